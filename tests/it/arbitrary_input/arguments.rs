//! Names, leases, timeouts, hold counts, ids and settings.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use redis::{Connection, cmd};
use redisson_lock::{ClientId, Error, LockClient, MAX_NAME_LEN, Owner, OwnerExt};

use super::{LIMIT, LONGEST, any_duration, check, odd_text, quiet, runtime};
use crate::support::server::{Server, unique, wait_until};

/// A server, two clients, and two independent connections.
struct Bench {
    observer: Connection,
    listener: Connection,
    one: LockClient,
    other: LockClient,
    _server: Server,
}

impl Bench {
    async fn new() -> Mutex<Self> {
        let server = Server::start();
        let mut listener = server.connection();
        let subscribe = cmd("PSUBSCRIBE").arg("*").get_packed_command();
        listener.send_packed_command(&subscribe).unwrap();
        listener.recv_response().unwrap();
        let one = quiet().connect(&server.url()).await.unwrap();
        let other = quiet().connect(&server.url()).await.unwrap();
        Mutex::new(Self {
            observer: server.connection(),
            listener,
            one,
            other,
            _server: server,
        })
    }

    /// How many scripts and plain commands on keys the server has run. Commands of the subscribed
    /// connections do not count: they may arrive at any time.
    fn commands(&mut self) -> u64 {
        let stats: String = cmd("INFO")
            .arg("commandstats")
            .query(&mut self.observer)
            .unwrap();
        let counts = stats
            .lines()
            .filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(":calls="));
        let ignored = [
            "info",
            "ping",
            "subscribe",
            "unsubscribe",
            "client",
            "pubsub",
        ];
        counts
            .filter(|(command, _)| {
                ignored
                    .iter()
                    .all(|name| command.split('|').next() != Some(*name))
            })
            .filter_map(|(_, rest)| rest.split(',').next()?.parse::<u64>().ok())
            .sum()
    }

    /// The channel and the payload of the next message.
    fn next_message(&mut self) -> (Vec<u8>, Vec<u8>) {
        let message: Vec<Vec<u8>> =
            redis::from_redis_value(self.listener.recv_response().unwrap()).unwrap();
        (message[2].clone(), message[3].clone())
    }

    fn subscribers(&mut self, channel: &[u8]) -> usize {
        let (_, count): (Vec<u8>, usize) = cmd("PUBSUB")
            .arg("NUMSUB")
            .arg(channel)
            .query(&mut self.observer)
            .unwrap();
        count
    }

    fn is_empty(&mut self) -> bool {
        cmd("DBSIZE").query::<usize>(&mut self.observer).unwrap() == 0
    }
}

/// Locks a bench, also after a case has failed.
fn lock_bench(bench: &Mutex<Bench>) -> std::sync::MutexGuard<'_, Bench> {
    bench.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asserts that an error is shown as one line of limited length, whatever the input.
fn assert_presentable(error: &Error) -> TestCaseResult {
    for text in [error.to_string(), format!("{error:?}")] {
        prop_assert!(text.len() < 2_000, "{} bytes", text.len());
        prop_assert!(!text.chars().any(char::is_control), "{text:?}");
    }
    Ok(())
}

/// The release channel of a name (Redisson's rule), or `None` for an invalid name.
fn channel_of(name: &str) -> Option<Vec<u8>> {
    if !(1..=MAX_NAME_LEN).contains(&name.len()) {
        return None;
    }
    let (open, close) = if name.as_bytes().contains(&b'{') {
        ("", "")
    } else {
        ("{", "}")
    };
    Some(
        [
            b"redisson_lock__channel:",
            open.as_bytes(),
            name.as_bytes(),
            close.as_bytes(),
        ]
        .concat(),
    )
}

fn any_name() -> impl Strategy<Value = String> {
    let huge = (
        odd_text(4).prop_filter("an empty text has no length to repeat", |text| {
            !text.is_empty()
        }),
        0..4_usize,
    );
    prop_oneof![
        6 => odd_text(12),
        2 => odd_text(200),
        1 => any::<String>(),
        // At the limit, just above it, and 1 MiB.
        2 => huge.prop_map(|(text, more)| {
            let times = if more == 3 { (1 << 20) / text.len() } else { MAX_NAME_LEN / text.len() + more / 2 };
            text.repeat(times)
        }),
    ]
}

/// A name that shows only its beginning in `Debug`.
#[derive(Clone)]
struct Name(String);

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let beginning: String = self.0.chars().take(40).collect();
        write!(f, "{beginning:?} ({} bytes)", self.0.len())
    }
}

async fn check_refused(bench: &mut Bench, name: &str) -> TestCaseResult {
    let before = bench.commands();
    let lock = bench.one.lock(name);
    let answers = [
        lock.try_lock().await.map(drop),
        lock.lock().await.map(drop),
        lock.run(async {}).await,
        lock.unlock().with_owner(Owner::new()).await,
        lock.force_unlock().await.map(drop),
        lock.is_locked().await.map(drop),
    ];
    for answer in answers {
        let Err(error @ Error::InvalidName { .. }) = answer else {
            return Err(TestCaseError::fail(format!("{answer:?}")));
        };
        assert_presentable(&error)?;
    }
    prop_assert_eq!(bench.commands(), before, "a command was sent");
    Ok(())
}

async fn check_works(bench: &mut Bench, name: &str, channel: &[u8]) -> TestCaseResult {
    let (mine, theirs) = (bench.one.lock(name), bench.other.lock(name));
    let guard = mine.try_lock().await?.expect("the lock is free");
    let keys: Vec<Vec<u8>> = cmd("KEYS").arg("*").query(&mut bench.observer).unwrap();
    prop_assert_eq!(keys, vec![name.as_bytes().to_vec()]);
    let owner = format!("{}:{}", bench.one.client_id(), guard.owner());
    let fields: Vec<(String, u64)> = cmd("HGETALL").arg(name).query(&mut bench.observer).unwrap();
    prop_assert_eq!(fields, vec![(owner, 1)]);
    prop_assert_eq!(mine.name(), name);
    prop_assert!(theirs.is_locked().await?);
    prop_assert!(theirs.try_lock().await?.is_none());
    // There is no re-check: only a message on the release channel wakes the waiter.
    let waiting = tokio::spawn(theirs.lock().into_future());
    wait_until("the waiter is subscribed", LIMIT, || {
        bench.subscribers(channel) == 1
    });
    guard.unlock().await?;
    prop_assert_eq!(bench.next_message(), (channel.to_vec(), b"0".to_vec()));
    let woken = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("the waiter is woken")
        .expect("no panic")?;
    woken.unlock().await?;
    prop_assert_eq!(bench.next_message(), (channel.to_vec(), b"0".to_vec()));
    prop_assert!(bench.is_empty(), "a key is left");
    wait_until("no connection is subscribed", LIMIT, || {
        bench.subscribers(channel) == 0
    });
    Ok(())
}

#[test]
fn any_name_is_refused_or_works() {
    let runtime = runtime();
    let bench = runtime.block_on(Bench::new());
    check(150, any_name().prop_map(Name), |Name(name)| {
        let bench = &mut *lock_bench(&bench);
        runtime.block_on(async {
            match channel_of(&name) {
                Some(channel) => check_works(bench, &name, &channel).await,
                None => check_refused(bench, &name).await,
            }
        })
    });
}

/// Whether a request is refused without a command to the server. The background may send commands
/// of earlier cases in between, but not each time.
async fn sends_nothing<T, F: IntoFuture<Output = T>>(
    bench: &mut Bench,
    request: impl Fn() -> F,
) -> bool {
    for _ in 0..50 {
        let before = bench.commands();
        request().await;
        if bench.commands() == before {
            return true;
        }
    }
    false
}

/// Acquires a free lock with a lease. Afterwards nothing of it is left.
async fn check_lease(bench: &mut Bench, lease: Duration) -> TestCaseResult {
    let name = unique("lease");
    let lock = bench.one.lock(&name);
    let begun = Instant::now();
    let answer = lock.try_lock().lease(lease).await;
    if lease < Duration::from_millis(1) || lease > LONGEST {
        let Err(error @ Error::InvalidLease { .. }) = &answer else {
            return Err(TestCaseError::fail(format!("{answer:?}")));
        };
        assert_presentable(error)?;
        prop_assert!(
            sends_nothing(bench, || lock.try_lock().lease(lease)).await,
            "a command was sent"
        );
        return Ok(());
    }
    let millis = lease.as_millis() as i64;
    let pttl: i64 = cmd("PTTL").arg(&name).query(&mut bench.observer).unwrap();
    let elapsed = begun.elapsed();
    // Expired, or running.
    let has_expired = |elapsed: Duration| elapsed + Duration::from_millis(2) >= lease;
    match pttl {
        -2 => prop_assert!(has_expired(elapsed), "expired after {elapsed:?}"),
        left => {
            prop_assert!(
                left >= 0 && left <= millis && left + elapsed.as_millis() as i64 + 5 >= millis,
                "{left} ms"
            )
        }
    }
    // The owner counts the lease as expired a twentieth earlier.
    let may_be_lost = |elapsed: Duration| elapsed + Duration::from_millis(1) >= lease - lease / 20;
    match answer {
        Ok(Some(guard)) => {
            prop_assert!(guard.remaining_lease() <= lease);
            match guard.unlock().await {
                Ok(()) => {}
                Err(Error::Lost { .. }) => {
                    prop_assert!(may_be_lost(begun.elapsed()), "lost too early")
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(Error::Lost { .. }) => prop_assert!(may_be_lost(begun.elapsed()), "lost too early"),
        other => prop_assert!(false, "{other:?}"),
    }
    wait_until("nothing is left", LIMIT, || bench.is_empty());
    Ok(())
}

#[test]
fn any_lease_is_refused_or_set() {
    let runtime = runtime();
    let bench = runtime.block_on(Bench::new());
    check(400, any_duration(), |time| {
        runtime.block_on(check_lease(&mut lock_bench(&bench), time))
    });
}

async fn check_timeout(bench: &mut Bench, timeout: Duration) -> TestCaseResult {
    let lock = bench.one.lock(unique("timeout"));
    let answer = lock.lock().timeout(timeout).await;
    if timeout > LONGEST {
        let Err(error @ Error::InvalidTimeout { .. }) = &answer else {
            return Err(TestCaseError::fail(format!("{answer:?}")));
        };
        assert_presentable(error)?;
        prop_assert!(
            sends_nothing(bench, || lock.lock().timeout(timeout)).await,
            "a command was sent"
        );
        return Ok(());
    }
    let guard = answer?;
    // While another owner holds the lock, the request waits for its whole timeout, or for as long
    // as this test allows.
    let theirs = bench.other.lock(lock.name());
    let limit = Duration::from_millis(10);
    let begun = Instant::now();
    match tokio::time::timeout(limit, theirs.try_lock_for(timeout)).await {
        Ok(answer) => {
            prop_assert!(answer?.is_none());
            prop_assert!(
                begun.elapsed() >= timeout,
                "gave up after {:?}",
                begun.elapsed()
            );
        }
        Err(_) => prop_assert!(begun.elapsed() >= limit),
    }
    guard.unlock().await?;
    wait_until("nothing is left", LIMIT, || bench.is_empty());
    Ok(())
}

#[test]
fn any_timeout_is_refused_or_waited() {
    let runtime = runtime();
    let bench = runtime.block_on(Bench::new());
    check(150, any_duration(), |time| {
        runtime.block_on(check_timeout(&mut lock_bench(&bench), time))
    });
}

/// A hold count that another program has written.
async fn check_count(bench: &mut Bench, count: &str) -> TestCaseResult {
    let name = unique("count");
    let lock = bench.one.lock(&name);
    let owner = Owner::from_thread_id(52)?;
    let field = format!("{}:52", bench.one.client_id());
    cmd("HSET")
        .arg(&name)
        .arg(&field)
        .arg(count)
        .exec(&mut bench.observer)
        .unwrap();
    cmd("PEXPIRE")
        .arg(&name)
        .arg(600_000)
        .exec(&mut bench.observer)
        .unwrap();
    let stored = |bench: &mut Bench| -> Option<String> {
        cmd("HGET")
            .arg(&name)
            .arg(&field)
            .query(&mut bench.observer)
            .unwrap()
    };
    // A count in the form that clients write.
    let plain = count
        .parse::<i64>()
        .ok()
        .filter(|number| *number >= 0 && number.to_string() == count);
    match plain {
        Some(number) => prop_assert_eq!(lock.hold_count_of(owner).await?, number as u64),
        // Another number, or none: it may be reported, and nothing else.
        None => match lock.hold_count_of(owner).await {
            Ok(number) => prop_assert_eq!(Some(number as i64), count.parse().ok()),
            Err(error) => assert_presentable(&error)?,
        },
    }
    prop_assert!(bench.other.lock(&name).try_lock().await?.is_none());
    let answer = lock.try_lock().with_owner(owner).await;
    match plain.filter(|number| *number < i64::MAX) {
        Some(number) => {
            let guard = answer?.expect("the re-entry is granted");
            prop_assert_eq!(stored(bench), Some((number + 1).to_string()));
            guard.unlock().await?;
            prop_assert_eq!(stored(bench), (number > 0).then(|| number.to_string()));
        }
        None => {
            let Err(error @ Error::Server { .. }) = answer else {
                return Err(TestCaseError::fail(format!("{answer:?}")));
            };
            assert_presentable(&error)?;
            prop_assert_eq!(
                stored(bench),
                Some(count.to_owned()),
                "the count was changed"
            );
        }
    }
    lock.force_unlock().await?;
    prop_assert!(bench.is_empty());
    Ok(())
}

#[test]
fn any_hold_count_is_refused_or_incremented() {
    let counts = prop_oneof![
        3 => odd_text(8),
        3 => any::<i64>().prop_map(|number| number.to_string()),
        2 => (i64::MAX - 2..=i64::MAX).prop_map(|number| number.to_string()),
        2 => (-3..12_i64).prop_map(|number| number.to_string()),
        2 => "[+ -]?0{0,3}[0-9]{0,20}([.e][0-9]{0,3})? ?",
    ];
    let runtime = runtime();
    let bench = runtime.block_on(Bench::new());
    check(300, counts, |text| {
        runtime.block_on(check_count(&mut lock_bench(&bench), &text))
    });
}

#[test]
fn any_thread_id_is_refused_or_sent() {
    let runtime = runtime();
    let bench = runtime.block_on(Bench::new());
    let ids = prop_oneof![2 => any::<i64>(), 1 => -3..4_i64, 1 => i64::MAX - 2..=i64::MAX];
    check(200, ids, |id| {
        let bench = &mut *lock_bench(&bench);
        let owner = match Owner::from_thread_id(id) {
            Ok(owner) => owner,
            Err(error) => {
                prop_assert!(id < 1, "{error}");
                return assert_presentable(&error);
            }
        };
        prop_assert!(id >= 1);
        prop_assert_eq!(owner.thread_id(), id);
        let name = unique("thread");
        runtime.block_on(async {
            let lock = bench.one.lock(&name);
            let guard = lock
                .try_lock()
                .with_owner(owner)
                .await?
                .expect("the lock is free");
            let fields: Vec<String> = cmd("HKEYS").arg(&name).query(&mut bench.observer).unwrap();
            prop_assert_eq!(fields, vec![format!("{}:{id}", bench.one.client_id())]);
            guard.unlock().await?;
            prop_assert!(bench.is_empty());
            Ok(())
        })
    });
}

#[test]
fn any_client_id_is_refused_or_formatted_as_uuid() {
    let mutated = (any::<[u8; 16]>(), 0..60_usize, any::<char>(), any::<bool>()).prop_map(
        |(id, at, new, upper)| {
            let mut text: Vec<char> = ClientId::from(uuid::Uuid::from_bytes(id))
                .to_string()
                .chars()
                .collect();
            if let Some(old) = text.get_mut(at) {
                *old = new;
            }
            let text = String::from_iter(text);
            if upper { text.to_uppercase() } else { text }
        },
    );
    let texts = prop_oneof![
        mutated,
        odd_text(60),
        "[0-9a-fA-F-]{30,40}",
        "(urn:uuid:|\\{)?[0-9a-f]{32}\\}?"
    ];
    check(2_000, texts, |text| {
        match text.parse::<ClientId>() {
            Ok(id) => {
                let written = id.to_string();
                prop_assert_eq!(written.len(), 36);
                prop_assert!(
                    written
                        .chars()
                        .all(|c| c == '-' || (c.is_ascii_hexdigit() && !c.is_ascii_uppercase()))
                );
                let digits = |text: &str| {
                    text.chars()
                        .filter(char::is_ascii_hexdigit)
                        .collect::<String>()
                };
                let given = digits(text.strip_prefix("urn:uuid:").unwrap_or(&text)).to_lowercase();
                prop_assert_eq!(digits(&written), given);
                prop_assert_eq!(written.parse::<ClientId>(), Ok(id));
            }
            Err(error) => {
                prop_assert!(
                    matches!(
                        error,
                        Error::InvalidConfig {
                            setting: "client id",
                            ..
                        }
                    ),
                    "{error:?}"
                );
                assert_presentable(&error)?;
            }
        }
        Ok(())
    });
}

#[test]
fn any_setting_is_refused_or_accepted() {
    // A closed port: an accepted setting fails with another error than a refused one.
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let url = format!("redis://{closed}");
    let runtime = runtime();
    let hour = Duration::from_secs(3600);
    let ms = Duration::from_millis;
    check(200, (0..5_usize, any_duration()), |(setting, value)| {
        let builder = quiet();
        let (builder, bounds) = match setting {
            // The limit of a reply follows from it.
            0 => (
                LockClient::builder().watchdog_timeout(value),
                ms(50)..=LONGEST,
            ),
            1 => (builder.recheck_interval(value), ms(10)..=hour),
            2 => (builder.retry_timeout(value), Duration::ZERO..=hour),
            3 => (builder.connect_timeout(value), ms(1)..=hour),
            _ => (
                builder.watchdog_timeout(LONGEST).command_timeout(value),
                ms(10)..=hour,
            ),
        };
        let answer =
            runtime.block_on(async { tokio::time::timeout(LIMIT, builder.connect(&url)).await });
        let error = answer
            .expect("connecting ends")
            .expect_err("the port is closed");
        assert_presentable(&error)?;
        let is_refused = matches!(error, Error::InvalidConfig { .. });
        prop_assert_eq!(is_refused, !bounds.contains(&value), "{}", error);
        Ok(())
    });
}
