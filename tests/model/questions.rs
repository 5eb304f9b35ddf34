//! What is asked after each step: of the server by an independent connection, of the library, and
//! of the guards.

use std::time::{Duration, Instant};

use futures::FutureExt;
use proptest::test_runner::TestCaseError;
use proptest::{prop_assert, prop_assert_eq};
use redis::cmd;
use redisson_lock::{LockGuard, LockInfo};

use crate::reference::{Held, Span};
use crate::support::server::wait_until;
use crate::world::{Guarded, LIMIT, Outcome, World};

/// How far clocks may be apart, and numbers rounded.
const SLACK: Duration = Duration::from_millis(100);

/// Whether two answers about time agree, when a clock is read between two moments.
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

impl World<'_> {
    /// Waits until the lock's hold count on the server is as it should be.
    pub fn wait_for(&self, lock: usize, what: &str, done: impl Fn(Option<u64>) -> bool) {
        wait_until(what, LIMIT, || {
            let counts: Vec<u64> = cmd("HVALS")
                .arg(&self.names[lock])
                .query(&mut *self.bench.observer())
                .unwrap();
            done(counts.first().copied())
        });
    }

    /// What an independent connection sees.
    pub fn look(&self, lock: usize) -> Outcome {
        let from = Instant::now();
        let mut pipe = redis::pipe();
        pipe.atomic()
            .hgetall(&self.names[lock])
            .pttl(&self.names[lock]);
        let (fields, pttl): (Vec<(String, u64)>, i64) =
            pipe.query(&mut *self.bench.observer()).expect("an answer");
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

    /// Whether what a client says of a lock is so.
    pub fn assert_info(&self, held: &Held, info: &LockInfo, client: usize, read: Span) -> Outcome {
        let field = self.owner_field(held.owner);
        prop_assert_eq!((&info.owner, info.hold_count), (&field, held.count));
        let local = field.starts_with(&self.bench.clients[client].client_id().to_string());
        let expected = local.then(|| self.owners[held.owner]);
        prop_assert_eq!(info.local_owner, expected);
        assert_left(info.ttl.expect("an expiry"), held.expires, read)
    }

    /// What the library says about a lock, to one of the clients and to its owner and another
    /// owner.
    pub async fn ask(&self, lock: usize, client: usize, who: usize) -> Outcome {
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
            (held, info) => prop_assert!(false, "{info:?} of {held:?}"),
        }
        for who in held.iter().map(|held| held.owner).chain([who]) {
            let (real, owner) = self.lock_of(who, lock);
            let count = self.model.count(who, lock);
            prop_assert_eq!(real.hold_count_of(owner).await, Ok(count));
            prop_assert_eq!(real.is_held_by(owner).await, Ok(count > 0));
        }
        Ok(())
    }

    /// What the guards say.
    pub fn look_at_guards(&self) -> Outcome {
        for Guarded { hold, guard } in &self.guards {
            let lost = self.model.lost(*hold);
            prop_assert_eq!(guard.is_lost(), lost.is_some());
            prop_assert_eq!(guard.lost().now_or_never(), lost);
            prop_assert_eq!(guard.remaining_lease().is_zero(), lost.is_some());
            if let Some(held) = &self.model.locks[self.lock_at(guard)?] {
                let sure = Instant::now() + guard.remaining_lease();
                let stale = lost.is_some() || self.model.is_stale(*hold);
                prop_assert!(stale || sure <= held.expires.to, "surer than the server");
            }
        }
        Ok(())
    }

    /// Which lock a guard is of, by its own word.
    fn lock_at(&self, guard: &LockGuard) -> Outcome<usize> {
        let told = format!("{guard:?}");
        let at = self
            .names
            .iter()
            .position(|name| told.contains(&format!("{name:?}")));
        at.ok_or_else(|| TestCaseError::fail(format!("no lock of this case: {told}")))
    }
}
