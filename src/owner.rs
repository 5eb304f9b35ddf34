//! Owners of locks: the client's id, the thread id, and the scopes that make an owner ambient.

use std::collections::hash_map::RandomState;
use std::fmt::{self, Write};
use std::hash::{BuildHasher, Hash, Hasher};
use std::pin::Pin;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use pin_project_lite::pin_project;
use tokio::task::futures::TaskLocalFuture;
use uuid::Uuid;

tokio::task_local! {
    static AMBIENT: Option<Owner>;
}

/// The id of one client among all clients of a server: a UUID, as in Redisson. It is the part
/// CLIENT of `CLIENT:THREAD`, by which an [`Owner`] is known in the key of a lock.
///
/// Each [`LockClient`](crate::LockClient) gets a random id, unless
/// [`LockClientBuilder::client_id`](crate::LockClientBuilder::client_id) sets one. Two processes
/// that use the same id at the same time are one client to the server: an owner of one process can
/// release what an owner with the same thread id of the other process holds.
///
/// ```
/// use redisson_lock::ClientId;
///
/// let id: ClientId = "6F1B5CD0-7C40-4F0A-9E0D-2B7A3C1D9E11".parse()?;
/// assert_eq!(id.to_string(), "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11");
/// # Ok::<(), redisson_lock::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(Uuid);

impl ClientId {
    /// A new random id (UUID version 4).
    ///
    /// ```
    /// use redisson_lock::ClientId;
    ///
    /// assert_ne!(ClientId::random(), ClientId::random());
    /// ```
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

impl fmt::Display for ClientId {
    /// Writes 36 characters in lower case, as on the wire.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

/// The logical thread that holds a lock. An owner that locks a lock which it holds already
/// re-enters it; any other owner waits. Each acquisition of a [`SimpleLock`](crate::SimpleLock) has
/// a new owner, which no scope and no policy changes; the rest of this page is about reentrant and
/// fenced locks.
///
/// On the wire an owner is the field `CLIENT:THREAD` in the hash of the lock (the value of a simple
/// lock): the [`ClientId`], and a thread id that is unique within the client. In Redisson, THREAD
/// is the id of a Java thread. A tokio task moves between threads, and one task can run several
/// branches at once, so in this library an owner is a value that is independent of threads and
/// tasks.
///
/// **Outside any scope**, each acquisition has a new owner. Nothing re-enters, and two branches of
/// one `join!` exclude each other.
///
/// **Inside a scope**, the owner of the scope is ambient: every acquisition in it has that owner,
/// and locking the same lock again re-enters. These functions open a scope:
///
/// | function | owner of the scope |
/// |---|---|
/// | [`Lock::run`](crate::Lock::run), except of a simple lock | the owner of the acquired hold |
/// | [`LockGuard::run`](crate::LockGuard::run), except of a simple lock | the owner of the guard's hold |
/// | [`Owner::scope`] | a new owner |
/// | [`OwnerExt::with_owner`] | the owner that is passed |
///
/// A scope covers its own future only. A task that is spawned inside it has no ambient owner,
/// unless [`OwnerExt::in_current_owner`] carries the owner into the task.
///
/// [`OwnerPolicy::PerTask`] replaces the rule for acquisitions outside any scope by Redisson's own.
///
/// ```
/// use redisson_lock::{Owner, OwnerExt};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let (outer, inner) = Owner::scope(async {
///     let spawned = tokio::spawn(async { Owner::current() });
///     assert_eq!(spawned.await.unwrap(), None);
///
///     let child = tokio::spawn(async { Owner::current() }.in_current_owner());
///     (Owner::current(), child.await.unwrap())
/// })
/// .await;
/// assert!(outer.is_some());
/// assert_eq!(outer, inner);
/// assert_eq!(Owner::current(), None);
/// # }
/// ```
#[derive(Clone, Copy)]
pub struct Owner {
    thread_id: i64,
    /// Whether only this process knows the id. Otherwise another process may hold locks under it.
    private: bool,
}

impl Owner {
    /// A new owner, different from all others.
    ///
    /// ```
    /// use redisson_lock::Owner;
    ///
    /// assert_ne!(Owner::new(), Owner::new());
    /// ```
    #[expect(
        clippy::new_without_default,
        reason = "two default values would not be equal"
    )]
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::private(Family::Fresh, NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The owner with a thread id that other processes may use, too. It is above 0.
    pub(crate) fn shared(thread_id: i64) -> Self {
        Self {
            thread_id,
            private: false,
        }
    }

    /// The part THREAD of the field `CLIENT:THREAD` on the wire. It is above 0.
    ///
    /// ```
    /// use redisson_lock::Owner;
    ///
    /// let owner = Owner::new();
    /// assert_eq!(owner.to_string(), owner.thread_id().to_string());
    /// ```
    #[must_use]
    pub fn thread_id(self) -> i64 {
        self.thread_id
    }

    /// The owner of the surrounding scope. `None` outside any scope.
    ///
    /// Under [`OwnerPolicy::PerTask`] a client has a current owner outside any scope, too:
    /// [`LockClient::current_owner`](crate::LockClient::current_owner) returns it.
    ///
    /// ```
    /// use redisson_lock::{Owner, OwnerExt};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// let owner = Owner::new();
    /// let inside = async { Owner::current() }.with_owner(owner).await;
    /// assert_eq!(inside, Some(owner));
    /// assert_eq!(Owner::current(), None);
    /// # }
    /// ```
    #[must_use]
    pub fn current() -> Option<Self> {
        AMBIENT.try_with(|owner| *owner).ok().flatten()
    }

    /// Runs the future in the scope of a new owner: a lock that the future locks again is
    /// re-entered.
    ///
    /// ```no_run
    /// use redisson_lock::Owner;
    ///
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// Owner::scope(async {
    ///     let outer = lock.lock().await?;
    ///     let inner = lock.lock().await?; // the same owner: re-enters
    ///     inner.unlock().await?;
    ///     outer.unlock().await
    /// })
    /// .await
    /// # }
    /// ```
    ///
    /// # Cancel safety
    /// Dropping the returned future drops the future given.
    pub fn scope<F: Future>(future: F) -> WithOwner<F> {
        future.with_owner(Self::new())
    }

    /// A private owner with this thread id, so that a simulation can be repeated.
    #[cfg(test)]
    pub(crate) fn numbered(thread_id: i64) -> Self {
        Self {
            thread_id,
            private: true,
        }
    }

    /// Whether this process knows every lock that is held under this owner.
    pub(crate) fn is_private(self) -> bool {
        self.private
    }

    /// The owner of the current tokio task; outside any task, the owner of the current thread.
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
        // The numbers start at a random one: a process that adopts the client id of its
        // predecessor, or shares it by mistake, does not repeat the other's thread ids. The lowest
        // bits hold the family.
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

/// Two owners are equal if they have the same thread id.
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

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owner").field(&self.thread_id).finish()
    }
}

impl fmt::Display for Owner {
    /// Writes the thread id.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.thread_id.fmt(f)
    }
}

/// The kinds of owner whose thread ids this process assigns.
#[derive(Clone, Copy)]
enum Family {
    Fresh = 0,
    Task = 1,
    Thread = 2,
}

/// Which owner an acquisition has outside any [`Owner`] scope. Inside a scope it is always the
/// owner of the scope.
///
/// ```no_run
/// use redisson_lock::{LockClient, OwnerPolicy};
///
/// # async fn example() -> Result<(), redisson_lock::Error> {
/// let client = LockClient::builder()
///     .owner_policy(OwnerPolicy::PerTask)
///     .connect("redis://127.0.0.1:6379")
///     .await?;
/// let lock = client.lock("order:42");
/// let outer = lock.lock().await?;
/// let inner = lock.lock().await?; // the same task: re-enters
/// # drop((outer, inner));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OwnerPolicy {
    /// Each acquisition has a new owner (the default). Nothing re-enters by accident.
    #[default]
    PerAcquisition,
    /// Each tokio task has one owner; outside any task, each thread has one. This is Redisson's own
    /// rule, with tasks in place of Java threads. It is meant for ported code.
    ///
    /// All branches of one task (`join!`, `select!`, `FuturesUnordered`) have the same owner, so
    /// they do not exclude each other.
    PerTask,
}

impl OwnerPolicy {
    /// The owner that an acquisition of the calling code has. `None`: a new one.
    pub(crate) fn current(self) -> Option<Owner> {
        Owner::current().or_else(|| match self {
            OwnerPolicy::PerAcquisition => None,
            OwnerPolicy::PerTask => Some(Owner::of_task()),
        })
    }
}

/// Runs futures and lock requests in the scope of an owner.
///
/// ```no_run
/// use redisson_lock::{Owner, OwnerExt};
///
/// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
/// let owner = Owner::new();
/// let guard = lock.lock().with_owner(owner).await?; // a request
/// let count = lock.hold_count_of(owner).with_owner(owner).await?; // a future
/// # assert_eq!(count, 1);
/// guard.unlock().await
/// # }
/// ```
pub trait OwnerExt: IntoFuture + Sized {
    /// Runs the future in the scope of this owner.
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
    ///
    /// # Cancel safety
    /// Dropping the returned future drops the future given.
    fn with_owner(self, owner: Owner) -> WithOwner<Self::IntoFuture> {
        WithOwner {
            inner: AMBIENT.scope(Some(owner), self.into_future()),
        }
    }

    /// Runs the future in the scope that surrounds this call. The future keeps the scope when it is
    /// spawned as a task. If no scope surrounds the call, the future runs outside any scope.
    ///
    /// ```no_run
    /// use redisson_lock::OwnerExt;
    ///
    /// # async fn example(lock: redisson_lock::ReentrantLock) -> Result<(), redisson_lock::Error> {
    /// let nested = lock.clone();
    /// lock.run(async move {
    ///     let task = async move { nested.lock().await?.unlock().await }; // re-enters
    ///     tokio::spawn(task.in_current_owner()).await
    /// })
    /// .await?
    /// .expect("the task does not panic")
    /// # }
    /// ```
    ///
    /// Under [`OwnerPolicy::PerTask`] a spawned task has an owner of its own, and this function
    /// does not change that outside a scope: pass
    /// [`LockClient::current_owner`](crate::LockClient::current_owner) to
    /// [`with_owner`](Self::with_owner) instead.
    ///
    /// # Cancel safety
    /// Dropping the returned future drops the future given.
    fn in_current_owner(self) -> WithOwner<Self::IntoFuture> {
        WithOwner {
            inner: AMBIENT.scope(Owner::current(), self.into_future()),
        }
    }
}

impl<F: IntoFuture> OwnerExt for F {}

pin_project! {
    /// A future that runs in the scope of an owner; [`Owner::scope`] and [`OwnerExt`] return it.
    /// Dropping it drops the inner future.
    ///
    /// ```
    /// use std::future::Ready;
    ///
    /// use redisson_lock::{Owner, WithOwner};
    ///
    /// let future: WithOwner<Ready<u32>> = Owner::scope(std::future::ready(42));
    /// # drop(future);
    /// ```
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

/// The number of a task. tokio offers it as text only; a text that is not a number is hashed.
fn number(id: tokio::task::Id) -> u64 {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    id.to_string()
        .parse()
        .unwrap_or_else(|_| STATE.hash_one(id))
}

/// The field `CLIENT:THREAD` of an owner in the hash of a lock.
pub(crate) fn owner_field(client: ClientId, owner: Owner) -> Bytes {
    const THREAD: usize = "9223372036854775807".len();
    let mut id = Uuid::encode_buffer();
    let client = client.0.as_hyphenated().encode_lower(&mut id);
    let mut field = String::with_capacity(client.len() + 1 + THREAD);
    field.push_str(client);
    // Writing into a string does not fail.
    let _ = write!(field, ":{owner}");
    field.into()
}

/// The thread id in an owner field; `None` if the field belongs to another client, or is not
/// written as this library writes it: `007` and `+7` are other fields than `7`.
pub(crate) fn thread_of(owner: &[u8], client: ClientId) -> Option<i64> {
    let thread = std::str::from_utf8(owner)
        .ok()?
        .strip_prefix(&client.to_string())?
        .strip_prefix(':')?;
    let number: i64 = thread.parse().ok()?;
    (number.to_string() == thread).then_some(number)
}

/// The task or thread that runs the calling code, for deadlock detection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TaskKey(pub(crate) i64);

impl TaskKey {
    pub(crate) fn current() -> Self {
        Self(Owner::of_task().thread_id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_ids_of_families_are_positive_and_distinct() {
        for number in [0, 1, u64::MAX / 2, u64::MAX] {
            let ids = [Family::Fresh, Family::Task, Family::Thread]
                .map(|f| Owner::private(f, number).thread_id());
            assert!(ids.iter().all(|id| *id > 0), "{ids:?}");
            assert!(ids[0] != ids[1] && ids[1] != ids[2], "{ids:?}");
        }
    }

    #[test]
    fn non_positive_thread_id_is_refused() {
        assert!(Owner::from_thread_id(0).is_err());
        assert!(Owner::from_thread_id(-7).is_err());
        assert_eq!(
            Owner::from_thread_id(i64::MAX).unwrap().thread_id(),
            i64::MAX
        );
    }

    #[test]
    fn owner_field_is_client_colon_thread() {
        let client: ClientId = "6F1B5CD0-7C40-4F0A-9E0D-2B7A3C1D9E11".parse().unwrap();
        let field = owner_field(client, Owner::from_thread_id(52).unwrap());
        assert_eq!(field, "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52");
        assert!("not-a-uuid".parse::<ClientId>().is_err());
    }

    #[tokio::test]
    async fn each_task_has_one_owner() {
        let here = Owner::of_task();
        assert_eq!(here, Owner::of_task());
        let there = tokio::spawn(async { (Owner::of_task(), Owner::of_task()) })
            .await
            .unwrap();
        assert_eq!(there.0, there.1);
        assert_ne!(here, there.0);
    }

    #[tokio::test]
    async fn nested_scope_restores_outer_owner() {
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
