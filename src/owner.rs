//! Owners of locks: the client's id and the owner's thread id.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};
use std::pin::Pin;
use std::str::FromStr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use pin_project_lite::pin_project;
use tokio::task::futures::TaskLocalFuture;
use uuid::Uuid;

use crate::error::Error;

tokio::task_local! {
    static AMBIENT: Option<Owner>;
}

/// Identifies one client among all that share a server: a random UUID, as in Redisson.
///
/// A fresh one is made for each [`LockClient`](crate::LockClient) unless
/// [`LockClientBuilder::client_id`](crate::LockClientBuilder::client_id) hands over another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(Uuid);

impl ClientId {
    /// A fresh random id (UUID version 4).
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }
}

impl From<Uuid> for ClientId {
    fn from(uuid: Uuid) -> Self {
        Self(uuid)
    }
}

impl From<ClientId> for Uuid {
    fn from(id: ClientId) -> Self {
        id.0
    }
}

impl FromStr for ClientId {
    type Err = Error;

    /// Reads a UUID in any of its usual forms.
    fn from_str(text: &str) -> Result<Self, Error> {
        let uuid = Uuid::try_parse(text).map_err(|problem| Error::InvalidConfig {
            setting: "client id",
            problem: problem.to_string(),
            allowed: "a UUID",
        })?;
        Ok(Self(uuid))
    }
}

impl fmt::Display for ClientId {
    /// 36 characters in lower case, as on the wire.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

/// A logical thread: it holds locks, and code that runs as the same owner can lock them again.
///
/// In Redisson the owner of a lock is a thread of a client. A tokio task moves between threads, and
/// one task can run two branches at once, so here the owner is a value. Outside any scope each
/// acquisition has an owner of its own, and two branches of one `join!` exclude each other; inside
/// an owner's scope locking again re-enters. The scope comes from
/// [`ReentrantLock::run`](crate::ReentrantLock::run), [`LockGuard::run`](crate::LockGuard::run),
/// [`Owner::scope`] or [`OwnerExt::with_owner`]. A spawned task is outside of it, unless
/// [`OwnerExt::in_current_owner`] carries it there.
///
/// ```
/// use redisson_lock::{Owner, OwnerExt};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let (outer, inner) = Owner::scope(async {
///     let child = tokio::spawn(async { Owner::current() }.in_current_owner());
///     (Owner::current(), child.await.unwrap())
/// })
/// .await;
/// assert!(outer.is_some());
/// assert_eq!(outer, inner);
/// assert_eq!(Owner::current(), None);
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    thread_id: i64,
    /// Whether only this process can know the id. Otherwise another process may hold locks under it.
    private: bool,
}

impl Owner {
    /// A fresh owner, unlike any other.
    #[expect(
        clippy::new_without_default,
        reason = "two defaults would not be equal"
    )]
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::private(Family::Fresh, NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The owner with this thread id: for handing a lock over between processes (together with
    /// [`LockClientBuilder::client_id`](crate::LockClientBuilder::client_id)), and for tests.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless the id is above 0.
    pub fn from_thread_id(thread_id: i64) -> Result<Self, Error> {
        if thread_id < 1 {
            return Err(Error::InvalidConfig {
                setting: "thread id",
                problem: format!("{thread_id} is not positive"),
                allowed: "1 to 9223372036854775807",
            });
        }
        Ok(Self {
            thread_id,
            private: false,
        })
    }

    /// The id that is THREAD in the field `CLIENT:THREAD` on the wire.
    #[must_use]
    pub fn thread_id(self) -> i64 {
        self.thread_id
    }

    /// The ambient owner, if there is one.
    ///
    /// Under [`OwnerPolicy::PerTask`] the client has a current owner outside any scope, too:
    /// [`LockClient::current_owner`](crate::LockClient::current_owner) tells.
    #[must_use]
    pub fn current() -> Option<Self> {
        AMBIENT.try_with(|owner| *owner).ok().flatten()
    }

    /// Runs the future in the scope of a fresh owner: whatever it locks, it can lock again.
    ///
    /// Dropping the returned future drops the future given.
    pub fn scope<F: Future>(future: F) -> WithOwner<F> {
        future.with_owner(Self::new())
    }

    /// Whether locks may be held under this owner without this process knowing.
    pub(crate) fn is_private(self) -> bool {
        self.private
    }

    /// The owner of the running tokio task, or of the thread outside any task: Redisson's own rule.
    pub(crate) fn of_task() -> Self {
        thread_local! {
            static OF_THREAD: u64 = {
                static NEXT: AtomicU64 = AtomicU64::new(0);
                NEXT.fetch_add(1, Ordering::Relaxed)
            };
        }
        match tokio::task::try_id() {
            Some(id) => Self::private(Family::Task, number(id)),
            None => Self::private(Family::Thread, OF_THREAD.with(|number| *number)),
        }
    }

    fn private(family: Family, number: u64) -> Self {
        // Counted from a random start, so that a process which adopts the client id of its
        // predecessor, or shares it by mistake, does not meet the other's owners. The lowest bits
        // keep the families apart.
        static START: LazyLock<u64> = LazyLock::new(rand::random);
        const FAMILIES: u64 = 4;
        const NUMBERS: u64 = (1 << 61) - 1;
        let number = START.wrapping_add(number) % NUMBERS + 1;
        // At least 4 and below 2^63, so positive.
        Self {
            thread_id: (number * FAMILIES + family as u64) as i64,
            private: true,
        }
    }
}

/// Two owners are the same if they have the same thread id.
impl PartialEq for Owner {
    fn eq(&self, other: &Self) -> bool {
        self.thread_id == other.thread_id
    }
}

impl Eq for Owner {}

impl Hash for Owner {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.thread_id.hash(state);
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.thread_id.fmt(f)
    }
}

#[derive(Clone, Copy)]
enum Family {
    Fresh = 0,
    Task = 1,
    Thread = 2,
}

/// Whose hold an acquisition becomes outside any [`Owner`] scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OwnerPolicy {
    /// A fresh owner for each acquisition (the default): nothing re-enters by accident.
    #[default]
    PerAcquisition,
    /// One owner for each tokio task, or for each thread outside a task: Redisson's own rule, for
    /// ported code.
    ///
    /// Two branches of one task (`join!`, `select!`, `FuturesUnordered`) then share their locks.
    PerTask,
}

impl OwnerPolicy {
    /// The owner that code here and now is, if it is any.
    pub(crate) fn current(self) -> Option<Owner> {
        Owner::current().or_else(|| match self {
            OwnerPolicy::PerAcquisition => None,
            OwnerPolicy::PerTask => Some(Owner::of_task()),
        })
    }
}

/// Runs futures and requests in the scope of an owner.
pub trait OwnerExt: IntoFuture + Sized {
    /// Runs the future in the scope of that owner.
    ///
    /// ```no_run
    /// use redisson_lock::{Owner, OwnerExt};
    ///
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let owner = Owner::new();
    /// let outer = lock.lock().with_owner(owner).await?;
    /// let inner = lock.lock().with_owner(owner).await?; // re-enters
    /// # drop((outer, inner));
    /// # Ok(()) }
    /// ```
    fn with_owner(self, owner: Owner) -> WithOwner<Self::IntoFuture> {
        WithOwner {
            inner: AMBIENT.scope(Some(owner), self.into_future()),
        }
    }

    /// Runs the future in the scope that surrounds this call, also where the future is spawned. If
    /// no scope surrounds it, the future runs in none.
    ///
    /// It carries scopes only. Under [`OwnerPolicy::PerTask`] a spawned task has an owner of its
    /// own: hand over [`LockClient::current_owner`](crate::LockClient::current_owner) with
    /// [`with_owner`](Self::with_owner).
    fn in_current_owner(self) -> WithOwner<Self::IntoFuture> {
        WithOwner {
            inner: AMBIENT.scope(Owner::current(), self.into_future()),
        }
    }
}

impl<F: IntoFuture> OwnerExt for F {}

pin_project! {
    /// A future in the scope of an owner. Dropping it drops the future in it.
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct WithOwner<F> {
        #[pin]
        inner: TaskLocalFuture<Option<Owner>, F>,
    }
}

impl<F: Future> Future for WithOwner<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.project().inner.poll(cx)
    }
}

impl<F> fmt::Debug for WithOwner<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WithOwner").finish_non_exhaustive()
    }
}

/// The number of a task. tokio keeps it to itself but prints it; a form that it may print one day
/// is hashed instead.
fn number(id: tokio::task::Id) -> u64 {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    id.to_string()
        .parse()
        .unwrap_or_else(|_| STATE.hash_one(id))
}

/// The field `CLIENT:THREAD` that an owner of a client has in a lock's hash.
pub(crate) fn owner_field(client: ClientId, owner: Owner) -> Bytes {
    format!("{client}:{owner}").into()
}

/// The thread id in an owner field, if the field is this client's.
pub(crate) fn thread_of(owner: &[u8], client: ClientId) -> Option<i64> {
    let thread = std::str::from_utf8(owner)
        .ok()?
        .strip_prefix(&client.to_string())?
        .strip_prefix(':')?;
    thread.parse().ok()
}

/// Which task runs here, for telling an owner's second self apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskId {
    Task(tokio::task::Id),
    Thread(std::thread::ThreadId),
}

impl TaskId {
    pub(crate) fn current() -> Self {
        tokio::task::try_id()
            .map_or_else(|| TaskId::Thread(std::thread::current().id()), TaskId::Task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_ids_are_positive_and_differ_between_families() {
        for number in [0, 1, u64::MAX / 2, u64::MAX] {
            let ids = [Family::Fresh, Family::Task, Family::Thread]
                .map(|f| Owner::private(f, number).thread_id());
            assert!(ids.iter().all(|id| *id > 0), "{ids:?}");
            assert!(ids[0] != ids[1] && ids[1] != ids[2], "{ids:?}");
        }
    }

    #[test]
    fn ids_that_are_not_positive_are_refused() {
        assert!(Owner::from_thread_id(0).is_err());
        assert!(Owner::from_thread_id(-7).is_err());
        assert_eq!(
            Owner::from_thread_id(i64::MAX).unwrap().thread_id(),
            i64::MAX
        );
    }

    #[test]
    fn the_owner_field_is_redissons() {
        let client: ClientId = "6F1B5CD0-7C40-4F0A-9E0D-2B7A3C1D9E11".parse().unwrap();
        let field = owner_field(client, Owner::from_thread_id(52).unwrap());
        assert_eq!(field, "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52");
        assert!("not-a-uuid".parse::<ClientId>().is_err());
    }

    #[tokio::test]
    async fn each_task_has_one_owner_of_its_own() {
        let here = Owner::of_task();
        assert_eq!(here, Owner::of_task());
        let there = tokio::spawn(async { (Owner::of_task(), Owner::of_task()) })
            .await
            .unwrap();
        assert_eq!(there.0, there.1);
        assert_ne!(here, there.0);
    }

    #[tokio::test]
    async fn scopes_nest_and_end() {
        let outer = Owner::new();
        async {
            assert_eq!(Owner::current(), Some(outer));
            Owner::scope(async { assert_ne!(Owner::current(), Some(outer)) }).await;
            assert_eq!(Owner::current(), Some(outer));
            assert_eq!(
                tokio::spawn(async { Owner::current() }).await.unwrap(),
                None
            );
        }
        .with_owner(outer)
        .await;
        assert_eq!(Owner::current(), None);
    }
}
