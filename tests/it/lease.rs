//! Leases: kept while they are held, never longer, and an owner hears of the end before anybody else
//! can begin.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::observe::{expired, pttl, rival, scripts, watch};
use crate::support::process::{self, Worker};
use crate::support::proxy::{Flow, Proxy, Way};
use crate::support::server::{Server, unique, wait_until};
use redisson_lock::{Error, LockClient, LockClientBuilder, LostReason, Owner};
use tokio::time::{sleep, timeout};

/// Far more than any step takes.
const SOON: Duration = Duration::from_secs(10);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn watchdog(millis: u64) -> LockClientBuilder {
    LockClient::builder().watchdog_timeout(ms(millis))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_without_a_lease_is_kept_far_beyond_its_timeout() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(3_000).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let mut lost = watch(&guard);
    let begun = Instant::now();
    let mut renewed = 0;
    let mut last = pttl(&mut redis, &name);
    while begun.elapsed() < ms(9_000) {
        let left = pttl(&mut redis, &name);
        // Renewed at 2000 ms left; the rest is for a busy machine.
        assert!(
            (100..=3_000).contains(&left),
            "{left} ms left after {:?}",
            begun.elapsed()
        );
        renewed += u32::from(left > last);
        last = left;
        sleep(ms(5)).await;
    }
    assert!(renewed >= 5, "{renewed} renewals");
    assert!(lost.try_recv().is_err() && !guard.is_lost());
    assert!(guard.remaining_lease() > Duration::ZERO);
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fixed_lease_is_not_renewed_and_its_end_is_told_before_a_rival_gets_in() {
    let server = Server::start();
    let mut redis = server.connection();
    // Its watchdog would renew many times meanwhile.
    let client = watchdog(300).connect(&server.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().lease(ms(2_000)).await.unwrap();
    let lost = watch(&guard);
    let rival = rival(&other, &name);
    let mut last = i64::MAX;
    while !rival.is_finished() && pttl(&mut redis, &name) > 200 {
        let left = pttl(&mut redis, &name);
        assert!(left <= last, "renewed from {last} to {left} ms");
        last = left;
        sleep(ms(5)).await;
    }
    let (entered, rivals) = timeout(SOON, rival)
        .await
        .expect("the rival never got in")
        .unwrap();
    assert!(guard.is_lost());
    let (told, reason) = timeout(SOON, lost)
        .await
        .expect("the loss was never told")
        .unwrap();
    assert!(
        told < entered,
        "told {:?} after the rival got in",
        told - entered
    );
    assert_eq!(reason, LostReason::Expired);
    let refused = guard.unlock().await;
    assert!(
        matches!(
            refused,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ),
        "{refused:?}"
    );
    // The unlock of what was lost takes nothing from the rival.
    rivals.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_hears_with_the_next_renewal_that_its_key_is_gone() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(3_000).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let lost = watch(&guard);
    redis::cmd("DEL").arg(&name).exec(&mut redis).unwrap();
    let begun = Instant::now();
    let (told, reason) = timeout(SOON, lost)
        .await
        .expect("the loss was never told")
        .unwrap();
    assert_eq!(reason, LostReason::Gone);
    // A renewal comes after a second; the end of the proof would come after 2850 ms.
    assert!(told - begun < ms(2_000), "{:?}", told - begun);
    assert!(guard.is_lost());
    assert_eq!(guard.remaining_lease(), Duration::ZERO);
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LostReason::Gone,
            ..
        })
    ));
}

/// Sets a flag when it is dropped.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guarded_work_is_stopped_when_its_lock_is_lost() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(3_000).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let (steps, dropped) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let flag = Dropped(Arc::clone(&dropped));
    let count = Arc::clone(&steps);
    let lock = client.lock(&name);
    let run = tokio::spawn(async move {
        lock.run(async move {
            let _flag = flag;
            loop {
                count.fetch_add(1, Ordering::AcqRel);
                sleep(ms(1)).await;
            }
        })
        .await
    });
    wait_until("the work has begun", SOON, || {
        steps.load(Ordering::Acquire) > 10
    });
    assert!(!dropped.load(Ordering::Acquire));
    redis::cmd("DEL").arg(&name).exec(&mut redis).unwrap();
    let outcome: Result<(), Error> = timeout(SOON, run)
        .await
        .expect("the work was not stopped")
        .unwrap();
    assert!(dropped.load(Ordering::Acquire), "the work lives on");
    assert!(
        matches!(&outcome, Err(Error::Lost { lock, reason: LostReason::Gone, .. }) if *lock == name),
        "{outcome:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_is_cut_off_knows_of_its_loss_before_a_rival_gets_in() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = watchdog(2_000).connect(&proxy.url()).await.unwrap();
    let other = LockClient::connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let lost = watch(&guard);
    let rival = rival(&other, &name);
    proxy.set(Way::Both, Flow::Hold);
    let (entered, rivals) = timeout(SOON, rival)
        .await
        .expect("the rival never got in")
        .unwrap();
    assert!(guard.is_lost());
    let (told, reason) = timeout(SOON, lost)
        .await
        .expect("the loss was never told")
        .unwrap();
    assert!(
        told < entered,
        "told {:?} after the rival got in",
        told - entered
    );
    assert_eq!(reason, LostReason::Expired);
    assert_eq!(guard.remaining_lease(), Duration::ZERO);

    // What the network brings late takes nothing from the rival.
    proxy.set(Way::Both, Flow::Pass);
    wait_until_answered(&client).await;
    let refused = guard.unlock().await;
    assert!(
        matches!(
            refused,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ),
        "{refused:?}"
    );
    assert!(!rivals.is_lost());
    rivals.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_unlock_of_a_lost_lock_needs_no_server_to_say_so() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = watchdog(600).connect(&proxy.url()).await.unwrap();
    let guard = client.lock(unique("stock")).lock().await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    assert_eq!(timeout(SOON, guard.lost()).await, Ok(LostReason::Expired));
    // By now the background tries to take it off the server, and goes on trying.
    sleep(ms(300)).await;
    let begun = Instant::now();
    let refused = guard.unlock().await;
    assert!(
        matches!(
            refused,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ),
        "{refused:?}"
    );
    assert!(begun.elapsed() < ms(2_000), "{:?}", begun.elapsed());
}

/// Waits until the client has a connection that answers again.
async fn wait_until_answered(client: &LockClient) {
    timeout(SOON, client.lock(unique("probe")).is_locked())
        .await
        .expect("no answer")
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_is_cut_off_for_half_its_lease_keeps_its_lock() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = watchdog(4_000)
        .command_timeout(ms(300))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let mut lost = watch(&guard);
    proxy.set(Way::Both, Flow::Hold);
    wait_until("half of the lease is over", SOON, || {
        pttl(&mut redis, &name) < 2_000
    });
    proxy.set(Way::Both, Flow::Pass);
    wait_until("the lease is restored", ms(1_500), || {
        pttl(&mut redis, &name) > 2_600
    });
    // Beyond the end of what was proved before.
    sleep(ms(2_500)).await;
    assert!(lost.try_recv().is_err() && !guard.is_lost());
    guard.unlock().await.unwrap();
    assert_eq!(pttl(&mut redis, &name), -2);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_locks_are_renewed_in_batches_and_a_spoilt_one_loses_only_itself() {
    const LOCKS: usize = 500;
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(3_000).connect(&server.url()).await.unwrap();
    let mut guards = Vec::new();
    for _ in 0..LOCKS {
        guards.push(client.lock(unique("stock")).lock().await.unwrap());
    }
    let names: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut redis).unwrap();
    assert_eq!(names.len(), LOCKS);
    redis::pipe()
        .del(&names[0])
        .set(&names[0], "something else")
        .exec(&mut redis)
        .unwrap();
    let (before, begun) = (scripts(&mut redis), Instant::now());
    // Long enough that every lease had to be renewed.
    sleep(ms(4_500)).await;
    let (calls, periods) = (
        scripts(&mut redis) - before,
        begun.elapsed().as_millis() as u64 / 1_000 + 1,
    );
    // Five batches of a hundred; what is taken one after the other may need some more in the first
    // periods.
    assert!(calls >= 4 * 5, "{calls} scripts cannot have renewed them");
    assert!(
        calls <= periods * 20,
        "{calls} scripts in {periods} periods"
    );
    let lost: Vec<_> = guards.iter().filter(|guard| guard.is_lost()).collect();
    assert_eq!(lost.len(), 1);
    assert_eq!(timeout(SOON, lost[0].lost()).await, Ok(LostReason::Gone));
    for name in &names[1..] {
        assert!(pttl(&mut redis, name) > 0);
    }
    assert_eq!(
        redis::cmd("GET").arg(&names[0]).query(&mut redis),
        Ok("something else".to_owned())
    );
    drop(guards);
    wait_until("all is given back", SOON, || {
        redis::cmd("DBSIZE").query(&mut redis) == Ok(1)
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_was_given_back_is_not_renewed() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(300).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    let owner = format!("{}:{}", client.client_id(), guard.owner());
    guard.unlock().await.unwrap();
    // The very hold that a renewal of it would keep alive.
    redis::pipe()
        .hset(&name, owner, 1)
        .pexpire(&name, 1_000)
        .exec(&mut redis)
        .unwrap();
    let mut last = i64::MAX;
    wait_until("it expires", SOON, || {
        let left = pttl(&mut redis, &name);
        assert!(left <= last, "renewed from {last} to {left} ms");
        last = left;
        left == -2
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_hold_is_renewed_until_it_is_unlocked() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = watchdog(1_500).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let lock = client.lock(&name);
    Owner::scope(async {
        let _ = lock.lock().await.unwrap().detach();
        let begun = Instant::now();
        while begun.elapsed() < ms(4_000) {
            assert!(
                pttl(&mut redis, &name) > 0,
                "it was let go after {:?}",
                begun.elapsed()
            );
            sleep(ms(5)).await;
        }
        lock.unlock().await.unwrap();
        assert_eq!(pttl(&mut redis, &name), -2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_lost_is_taken_off_the_server_when_it_is_back() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = watchdog(6_000)
        .command_timeout(ms(2_500))
        .connect(&proxy.url())
        .await
        .unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().await.unwrap();
    // Renewals get through, and their replies do not: the server has the lock when we cannot know
    // that.
    proxy.set(Way::Replies, Flow::Hold);
    assert_eq!(timeout(SOON, guard.lost()).await, Ok(LostReason::Expired));
    assert!(
        pttl(&mut redis, &name) > 1_000,
        "the renewal did not get through"
    );
    proxy.set(Way::Both, Flow::Pass);
    wait_until("it is given back", SOON, || pttl(&mut redis, &name) == -2);
    assert_eq!(expired(&mut redis), 0, "it ran out instead");
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_arrives_after_its_lease_is_no_grant() {
    let server = Server::start();
    let mut redis = server.connection();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::builder().connect(&proxy.url()).await.unwrap();
    let name = unique("stock");
    proxy.set(Way::Replies, Flow::Delay(ms(600)));
    let outcome = client.lock(&name).lock().lease(ms(200)).await;
    assert!(
        matches!(
            outcome,
            Err(Error::Lost {
                reason: LostReason::Expired,
                ..
            })
        ),
        "{outcome:?}"
    );
    wait_until("nothing is left", SOON, || pttl(&mut redis, &name) == -2);
    // Nor does anything of it stay in the way of the next.
    proxy.set(Way::Replies, Flow::Pass);
    client
        .lock(&name)
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_stood_still_does_no_more_guarded_work() {
    let server = Server::start();
    let mut redis = server.connection();
    let other = LockClient::connect(&server.url()).await.unwrap();
    for _ in 0..3 {
        let (name, work, done) = (unique("stock"), unique("work"), unique("done"));
        let settings = [
            ("URL", &*server.url()),
            ("LOCK", &name),
            ("WORK", &work),
            ("DONE", &done),
        ];
        let mut worker = Worker::start("lease::worker_process", "guarded work", &settings);
        let steps = |redis: &mut redis::Connection| -> u64 {
            redis::cmd("GET")
                .arg(&work)
                .query::<Option<u64>>(redis)
                .unwrap()
                .unwrap_or(0)
        };
        wait_until("the worker works", 3 * SOON, || steps(&mut redis) > 20);
        worker.pause();
        let rivals = timeout(SOON, rival(&other, &name))
            .await
            .expect("its lock is not freed")
            .unwrap()
            .1;
        let before = steps(&mut redis);
        worker.resume();
        wait_until("the worker has noticed", SOON, || {
            redis::cmd("EXISTS").arg(&done).query(&mut redis) == Ok(1)
        });
        let outcome: String = redis::cmd("GET").arg(&done).query(&mut redis).unwrap();
        assert!(outcome.contains("was lost"), "{outcome}");
        // One step may have been under way, between the look at the clock and the write.
        let after = steps(&mut redis);
        assert!(
            after <= before + 1,
            "{} steps of work after the loss",
            after - before
        );
        assert!(worker.ended(SOON).success());
        assert!(!rivals.is_lost());
        rivals.unlock().await.unwrap();
    }
}

/// Counts steps of work under the lock, until it is stopped; then writes down how it ended.
#[tokio::test]
async fn worker_process() {
    let Some(_) = process::role() else { return };
    let redis = redis::Client::open(process::setting("URL")).unwrap();
    let mut redis = redis.get_multiplexed_async_connection().await.unwrap();
    let mut at_work = redis.clone();
    let client = watchdog(1_500)
        .connect(&process::setting("URL"))
        .await
        .unwrap();
    let outcome = client
        .lock(process::setting("LOCK"))
        .run(async move {
            loop {
                redis::cmd("INCR")
                    .arg(process::setting("WORK"))
                    .exec_async(&mut at_work)
                    .await
                    .unwrap();
                sleep(ms(2)).await;
            }
        })
        .await;
    let Err(error): Result<(), Error> = outcome else {
        return;
    };
    redis::cmd("SET")
        .arg(process::setting("DONE"))
        .arg(error.to_string())
        .exec_async(&mut redis)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_margin_between_the_loss_and_the_end_of_the_lease_is_the_owners() {
    let server = Server::start();
    let client = watchdog(3_000).connect(&server.url()).await.unwrap();
    let name = unique("stock");
    let guard = client.lock(&name).lock().lease(ms(4_000)).await.unwrap();
    let begun = Instant::now();
    let mut redis = server.connection();
    assert_eq!(timeout(SOON, guard.lost()).await, Ok(LostReason::Expired));
    // The guard is still there, so its code may be as well: nobody gets in before the lease itself
    // is over.
    loop {
        let left = pttl(&mut redis, &name);
        // Looked at afterwards, so that a stall of this process proves nothing.
        if begun.elapsed() > ms(3_900) {
            break;
        }
        assert!(left > 0, "free after {:?}", begun.elapsed());
        sleep(ms(5)).await;
    }
    wait_until("the lease is over", SOON, || pttl(&mut redis, &name) == -2);

    // Without a guard nobody needs the margin.
    let guard = client.lock(&name).lock().lease(ms(4_000)).await.unwrap();
    assert_eq!(timeout(SOON, guard.lost()).await, Ok(LostReason::Expired));
    drop(guard);
    wait_until("it is given back", SOON, || pttl(&mut redis, &name) == -2);
}
