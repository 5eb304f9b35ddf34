//! The checks after each step: the server's state by an independent connection, the library's
//! answers, and the guards.

use std::time::{Duration, Instant};

use futures::FutureExt;
use proptest::test_runner::TestCaseError;
use proptest::{prop_assert, prop_assert_eq};
use redis::cmd;
use redisson_lock::{LockGuard, LockInfo};

use crate::case::{Case, Guarded, LIMIT, Outcome};
use crate::reference::{Held, Span};
use crate::support::server::wait_until;

/// The allowed difference between clocks, rounding included.
const SLACK: Duration = Duration::from_millis(100);

/// Checks a remaining time that was read within `read` against the expected expiry.
pub fn assert_left(left: Duration, expires: Span, read: Span) -> Outcome {
    let least = expires
        .from
        .saturating_duration_since(read.to)
        .saturating_sub(SLACK);
    let most = expires.to.saturating_duration_since(read.from) + SLACK;
    prop_assert!(
        left >= least && left <= most,
        "{left:?} left, not {least:?} to {most:?}"
    );
    Ok(())
}

impl Case<'_> {
    /// Waits until the lock's hold count on the server meets the condition; `None` for a free lock.
    pub fn wait_for(&self, lock: usize, what: &str, done: impl Fn(Option<u64>) -> bool) {
        wait_until(what, LIMIT, || {
            let counts: Vec<u64> = cmd("HVALS")
                .arg(&self.names[lock])
                .query(&mut *self.fixture.observer())
                .unwrap();
            done(counts.first().copied())
        });
    }

    /// Checks the server's state by an independent connection.
    pub fn check_server(&self, lock: usize) -> Outcome {
        let from = Instant::now();
        let mut pipe = redis::pipe();
        pipe.atomic()
            .hgetall(&self.names[lock])
            .pttl(&self.names[lock]);
        let (fields, pttl): (Vec<(String, u64)>, i64) = pipe
            .query(&mut *self.fixture.observer())
            .expect("an answer");
        let read = Span {
            from,
            to: Instant::now(),
        };
        match &self.model.locks[lock] {
            None => prop_assert_eq!((fields, pttl), (vec![], -2)),
            Some(held) => {
                prop_assert_eq!(fields, vec![(self.owner_field(held.owner), held.count)]);
                prop_assert!(pttl >= 0, "the expiry is {pttl}");
                assert_left(Duration::from_millis(pttl as u64), held.expires, read)?;
            }
        }
        Ok(())
    }

    /// Checks what a client reports about a held lock.
    pub fn assert_info(&self, held: &Held, info: &LockInfo, client: usize, read: Span) -> Outcome {
        let field = self.owner_field(held.owner);
        prop_assert_eq!((&info.owner, info.hold_count), (&field, held.count));
        let local = field.starts_with(&self.fixture.clients[client].client_id().to_string());
        let expected = local.then(|| self.owners[held.owner]);
        prop_assert_eq!(info.local_owner, expected);
        assert_left(info.ttl.expect("an expiry"), held.expires, read)
    }

    /// Checks the library's answers about a lock: those of one client, and the hold counts of the
    /// lock's owner and of another owner.
    pub async fn check_answers(&self, lock: usize, client: usize, at: usize) -> Outcome {
        let held = &self.model.locks[lock];
        let real = self.lock(client, lock);
        prop_assert_eq!(real.is_locked().await, Ok(held.is_some()));
        let from = Instant::now();
        let info = real.inspect().await;
        let read = Span {
            from,
            to: Instant::now(),
        };
        match (held, info) {
            (None, Ok(None)) => {}
            (Some(held), Ok(Some(info))) => self.assert_info(held, &info, client, read)?,
            (held, info) => prop_assert!(false, "{info:?}, and the model has {held:?}"),
        }
        for at in held.iter().map(|held| held.owner).chain([at]) {
            let (real, owner) = self.lock_of(at, lock);
            let count = self.model.count(at, lock);
            prop_assert_eq!(real.hold_count_of(owner).await, Ok(count));
            prop_assert_eq!(real.is_held_by(owner).await, Ok(count > 0));
        }
        Ok(())
    }

    /// Checks the guards.
    pub fn check_guards(&self) -> Outcome {
        for Guarded { hold, guard } in &self.guards {
            let lost = self.model.lost(*hold);
            prop_assert_eq!(guard.is_lost(), lost.is_some());
            prop_assert_eq!(guard.lost().now_or_never(), lost);
            prop_assert_eq!(guard.remaining_lease().is_zero(), lost.is_some());
            if let Some(held) = &self.model.locks[self.lock_at(guard)?] {
                let certain_until = Instant::now() + guard.remaining_lease();
                let stale = lost.is_some() || self.model.is_stale(*hold);
                prop_assert!(
                    stale || certain_until <= held.expires.to,
                    "the guard's lease ends after the server's"
                );
            }
        }
        Ok(())
    }

    /// The index of a guard's lock, by the guard's `Debug` output.
    fn lock_at(&self, guard: &LockGuard) -> Outcome<usize> {
        let shown = format!("{guard:?}");
        let at = self
            .names
            .iter()
            .position(|name| shown.contains(&format!("{name:?}")));
        at.ok_or_else(|| TestCaseError::fail(format!("no lock of this case: {shown}")))
    }
}
