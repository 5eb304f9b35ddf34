//! Who holds a lock: the client's id and the holder's thread id.

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
    static AMBIENT: Option<Holder>;
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

/// A logical thread: who locks, and who locks again when nested code locks the same lock.
///
/// In Redisson the owner of a lock is a thread of a client. A tokio task moves between threads, and one task can run
/// two branches at once, so here the owner is a holder. Outside any holder each acquisition is a holder of its own, and
/// two branches of one `join!` exclude each other; inside a holder's scope locking again re-enters. The scope comes from
/// [`ReentrantLock::run`](crate::ReentrantLock::run), [`LockGuard::run`](crate::LockGuard::run), [`Holder::scope`] or
/// [`HolderExt::with_holder`]. It does not leak into spawned tasks; [`HolderExt::in_current_holder`] carries it there.
///
/// ```
/// use redisson_lock::{Holder, HolderExt};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let (outer, inner) = Holder::scope(async {
///     let child = tokio::spawn(async { Holder::current() }.in_current_holder());
///     (Holder::current(), child.await.unwrap())
/// })
/// .await;
/// assert!(outer.is_some());
/// assert_eq!(outer, inner);
/// assert_eq!(Holder::current(), None);
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Holder {
    thread_id: i64,
    /// Whether only this process can know the id. Otherwise somebody else may hold locks under it.
    private: bool,
}

impl Holder {
    /// A fresh holder, unlike any other.
    #[expect(clippy::new_without_default, reason = "two defaults would not be equal")]
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::private(Family::Fresh, NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The holder with this thread id: for handing a lock over between processes (together with
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
        Ok(Self { thread_id, private: false })
    }

    /// The id that is THREAD in the field `CLIENT:THREAD` on the wire.
    #[must_use]
    pub fn thread_id(self) -> i64 {
        self.thread_id
    }

    /// The ambient holder, if there is one.
    ///
    /// Under [`HolderPolicy::PerTask`] the client has a current holder outside any scope, too:
    /// [`LockClient::current_holder`](crate::LockClient::current_holder) tells.
    #[must_use]
    pub fn current() -> Option<Self> {
        AMBIENT.try_with(|holder| *holder).ok().flatten()
    }

    /// Runs the future in the scope of a fresh holder: whatever it locks, it can lock again.
    ///
    /// Dropping the returned future drops the future given.
    pub fn scope<F: Future>(future: F) -> WithHolder<F> {
        future.with_holder(Self::new())
    }

    /// Whether locks may be held under this holder without this process knowing.
    pub(crate) fn is_private(self) -> bool {
        self.private
    }

    /// The holder of the running tokio task, or of the thread outside any task: Redisson's own rule.
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
        // Counted from a random start, so that a process which adopts the client id of its predecessor, or shares it
        // by mistake, does not meet the other's holders. The lowest bits keep the families apart.
        static START: LazyLock<u64> = LazyLock::new(rand::random);
        const FAMILIES: u64 = 4;
        const NUMBERS: u64 = (1 << 61) - 1;
        let number = START.wrapping_add(number) % NUMBERS + 1;
        // At least 4 and below 2^63, so positive.
        Self { thread_id: (number * FAMILIES + family as u64) as i64, private: true }
    }
}

/// Two holders are the same if they have the same thread id.
impl PartialEq for Holder {
    fn eq(&self, other: &Self) -> bool {
        self.thread_id == other.thread_id
    }
}

impl Eq for Holder {}

impl Hash for Holder {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.thread_id.hash(state);
    }
}

impl fmt::Display for Holder {
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

/// Whose hold an acquisition becomes outside any [`Holder`] scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum HolderPolicy {
    /// A fresh holder for each acquisition (the default): nothing re-enters by accident.
    #[default]
    PerAcquisition,
    /// One holder for each tokio task, or for each thread outside a task: Redisson's own rule, for ported code.
    ///
    /// Two branches of one task (`join!`, `select!`, `FuturesUnordered`) then share their locks.
    PerTask,
}

impl HolderPolicy {
    /// The holder that code here and now is, if it is any.
    pub(crate) fn current(self) -> Option<Holder> {
        Holder::current().or_else(|| match self {
            HolderPolicy::PerAcquisition => None,
            HolderPolicy::PerTask => Some(Holder::of_task()),
        })
    }
}

/// Gives futures a holder.
pub trait HolderExt: Future + Sized {
    /// Runs the future in that holder's scope.
    fn with_holder(self, holder: Holder) -> WithHolder<Self> {
        WithHolder { inner: AMBIENT.scope(Some(holder), self) }
    }

    /// Runs the future in the scope of the holder that is ambient here and now, also where it is spawned. Where none is
    /// ambient now, none will be for the future.
    ///
    /// Only scopes are carried: under [`HolderPolicy::PerTask`] hand over the task's own holder with
    /// `with_holder(client.current_holder().unwrap())`.
    fn in_current_holder(self) -> WithHolder<Self> {
        WithHolder { inner: AMBIENT.scope(Holder::current(), self) }
    }
}

impl<F: Future> HolderExt for F {}

pin_project! {
    /// A future in the scope of a holder. Dropping it drops the future in it.
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct WithHolder<F> {
        #[pin]
        inner: TaskLocalFuture<Option<Holder>, F>,
    }
}

impl<F: Future> Future for WithHolder<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.project().inner.poll(cx)
    }
}

impl<F> fmt::Debug for WithHolder<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WithHolder").finish_non_exhaustive()
    }
}

/// The number of a task. tokio keeps it to itself but prints it; a form that it may print one day is hashed instead.
fn number(id: tokio::task::Id) -> u64 {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    id.to_string().parse().unwrap_or_else(|_| STATE.hash_one(id))
}

/// The field `CLIENT:THREAD` that a holder of a client has in a lock's hash.
pub(crate) fn owner_field(client: ClientId, holder: Holder) -> Bytes {
    format!("{client}:{holder}").into()
}

/// The thread id in an owner field, if the field is this client's.
pub(crate) fn thread_of(owner: &[u8], client: ClientId) -> Option<i64> {
    let thread = std::str::from_utf8(owner).ok()?.strip_prefix(&client.to_string())?.strip_prefix(':')?;
    thread.parse().ok()
}

/// Which task runs here, for telling a holder's second self apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskId {
    Task(tokio::task::Id),
    Thread(std::thread::ThreadId),
}

impl TaskId {
    pub(crate) fn current() -> Self {
        tokio::task::try_id().map_or_else(|| TaskId::Thread(std::thread::current().id()), TaskId::Task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_ids_are_positive_and_differ_between_families() {
        for number in [0, 1, u64::MAX / 2, u64::MAX] {
            let ids = [Family::Fresh, Family::Task, Family::Thread].map(|f| Holder::private(f, number).thread_id());
            assert!(ids.iter().all(|id| *id > 0), "{ids:?}");
            assert!(ids[0] != ids[1] && ids[1] != ids[2], "{ids:?}");
        }
    }

    #[test]
    fn ids_that_are_not_positive_are_refused() {
        assert!(Holder::from_thread_id(0).is_err());
        assert!(Holder::from_thread_id(-7).is_err());
        assert_eq!(Holder::from_thread_id(i64::MAX).unwrap().thread_id(), i64::MAX);
    }

    #[test]
    fn the_owner_field_is_redissons() {
        let client: ClientId = "6F1B5CD0-7C40-4F0A-9E0D-2B7A3C1D9E11".parse().unwrap();
        let field = owner_field(client, Holder::from_thread_id(52).unwrap());
        assert_eq!(field, "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52");
        assert!("not-a-uuid".parse::<ClientId>().is_err());
    }

    #[tokio::test]
    async fn each_task_has_one_holder_of_its_own() {
        let here = Holder::of_task();
        assert_eq!(here, Holder::of_task());
        let there = tokio::spawn(async { (Holder::of_task(), Holder::of_task()) }).await.unwrap();
        assert_eq!(there.0, there.1);
        assert_ne!(here, there.0);
    }

    #[tokio::test]
    async fn scopes_nest_and_end() {
        let outer = Holder::new();
        async {
            assert_eq!(Holder::current(), Some(outer));
            Holder::scope(async { assert_ne!(Holder::current(), Some(outer)) }).await;
            assert_eq!(Holder::current(), Some(outer));
            assert_eq!(tokio::spawn(async { Holder::current() }).await.unwrap(), None);
        }
        .with_holder(outer)
        .await;
        assert_eq!(Holder::current(), None);
    }
}
