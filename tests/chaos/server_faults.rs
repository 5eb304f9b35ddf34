//! Faults of the server itself, and of the rights of its users.

use std::collections::HashMap;
use std::time::Duration;

use redis::{FromRedisValue, RedisResult, Value, cmd};
use tokio::time::{Instant, sleep};

use super::faults::Slot;
use super::plan::{Kind, Planned};
use super::support::server::{Builder, Server};
use super::worker::{BUSY_LOCKS, lock_name};

/// How long the end of a fault may take.
const SOON: Duration = Duration::from_secs(10);

/// The rights of a worker's user.
const ALL: [&str; 6] = ["reset", "on", ">secret", "~*", "&*", "+@all"];

/// Adds a user for each worker.
pub fn with_users(server: Builder, workers: u64) -> Builder {
    (0..workers).fold(server, |server, slot| server.user(&user(slot), &ALL[1..]))
}

/// The server's URL with the user of a slot's worker.
pub fn login(url: &str, slot: u64) -> String {
    url.replace("redis://", &format!("redis://{}:secret@", user(slot)))
}

fn user(slot: u64) -> String {
    format!("worker{slot}")
}

/// Carries out a fault of the server. Returns whether it affected anything.
pub async fn act(
    server: &mut Server,
    slots: &[Slot],
    Planned {
        kind, lasts, slot, ..
    }: Planned,
) -> bool {
    let refused = || slots.iter().map(|slot| slot.proxy.refused()).sum::<usize>();
    let before = refused();
    // It begins when the fault has begun: on a busy machine a command may take a second.
    let lasting = || sleep(Duration::from_millis(lasts));
    match kind {
        // An error means that the connection of this call was killed.
        Kind::KillClients(which) => {
            return ask(server, &["CLIENT", "KILL", "TYPE", which]) != Ok(0_i64);
        }
        Kind::Busy => {
            be_busy(server, lasting()).await;
            return refused() > before;
        }
        Kind::FullMemory => {
            tell(server, &["CONFIG", "SET", "maxmemory", "1"]);
            lasting().await;
            tell(server, &["CONFIG", "SET", "maxmemory", "0"]);
            return refused() > before;
        }
        Kind::TakeRight(_, words) => {
            let (user, before) = (user(slots[slot].number), denied(server, slots[slot].number));
            tell(server, &[&["ACL", "SETUSER", &user], words].concat());
            lasting().await;
            let met = denied(server, slots[slot].number) > before;
            tell(server, &[&["ACL", "SETUSER", &user], &ALL[..]].concat());
            return met;
        }
        Kind::PauseClients(what) => {
            let _: RedisResult<Value> = ask(server, &["CLIENT", "PAUSE", &lasts.to_string(), what]);
            lasting().await;
        }
        Kind::FlushScripts => tell(server, &["SCRIPT", "FLUSH"]),
        Kind::StopServer => {
            server.pause();
            lasting().await;
            server.resume();
        }
        Kind::RestartServer | Kind::ForgetData => {
            server.kill();
            lasting().await;
            tokio::task::block_in_place(|| server.restart());
        }
        Kind::DeleteKeys => {
            for lock in 0..BUSY_LOCKS {
                let _: RedisResult<Value> = ask(server, &["DEL", &lock_name(lock)]);
            }
        }
        _ => {
            // Only while the lock is free, so that no owner loses it.
            let foreign = "if redis.call('exists', KEYS[1]) == 1 then return 0 end \
                           redis.call('hset', KEYS[1], 'foreign:1', 1) return redis.call('pexpire', KEYS[1], 7000)";
            let lock = lock_name(BUSY_LOCKS);
            for _ in 0..200 {
                if ask(server, &["EVAL", foreign, "1", &lock]) == Ok(1_i64) {
                    break;
                }
                sleep(Duration::from_millis(5)).await;
            }
            sleep(Duration::from_millis(lasts)).await;
            let _: RedisResult<Value> = ask(server, &["DEL", &lock]);
        }
    }
    true
}

/// Runs a script that does not end by itself.
async fn be_busy(server: &Server, lasting: impl Future<Output = ()>) {
    tell(server, &["CONFIG", "SET", "lua-time-limit", "20"]);
    let mut connection = tokio::task::block_in_place(|| server.connection());
    let script = tokio::task::spawn_blocking(move || {
        cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .exec(&mut connection)
            .is_err()
    });
    lasting.await;
    let limit = Instant::now() + SOON;
    while !script.is_finished() {
        assert!(Instant::now() < limit, "the script does not end");
        // An error means that the script has not begun, or has ended.
        let _: RedisResult<Value> = ask(server, &["SCRIPT", "KILL"]);
        sleep(Duration::from_millis(5)).await;
    }
    assert!(
        script.await.expect("the script's thread"),
        "a script with an endless loop has ended"
    );
}

/// How often the server has denied a call to a worker's user.
fn denied(server: &Server, slot: u64) -> i64 {
    let log: Vec<HashMap<String, Value>> =
        ask(server, &["ACL", "LOG", "128"]).expect("the log of denied calls");
    let user = Value::BulkString(user(slot).into_bytes());
    let own = log
        .iter()
        .filter(|entry| entry.get("username") == Some(&user));
    own.filter_map(|entry| i64::from_redis_value_ref(entry.get("count")?).ok())
        .sum()
}

fn tell(server: &Server, words: &[&str]) {
    let _: Value = ask(server, words).unwrap_or_else(|error| panic!("{words:?}: {error}"));
}

fn ask<T: FromRedisValue>(server: &Server, words: &[&str]) -> RedisResult<T> {
    tokio::task::block_in_place(|| redis::Cmd::new().arg(words).query(&mut server.connection()))
}
