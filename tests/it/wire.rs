//! The keys, messages and script calls of the library on the server have Redisson's form, and the
//! library handles keys and messages of other clients.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use crate::support::observe::ttl;
use crate::support::server::{Server, unique, wait_until};
use redis::{Connection, Value, cmd};
use redisson_lock::{Error, LockClient, LockClientBuilder, Owner, OwnerExt, ReentrantLock};

/// The limit of steps that need no lease to expire; far below the leases that the tests do not
/// wait for.
const LIMIT: Duration = Duration::from_secs(10);

/// Longer than any test: a step that needs this time to pass fails.
const NEVER: Duration = Duration::from_secs(3600);

/// The default watchdog timeout, ms.
const WATCHDOG: i64 = 30_000;

/// An owner field of Redisson.
const JAVA_OWNER: &str = "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52";

/// A server, a client with one lock, and an independent connection that reads the server's state.
struct Bench {
    server: Server,
    client: LockClient,
    lock: ReentrantLock,
    observer: Connection,
    name: String,
}

impl Bench {
    async fn new() -> Self {
        Self::with(quiet()).await
    }

    async fn with(builder: LockClientBuilder) -> Self {
        let server = Server::start();
        let client = builder.connect(&server.url()).await.unwrap();
        let name = unique("wire");
        Self {
            lock: client.lock(&name),
            observer: server.connection(),
            server,
            client,
            name,
        }
    }

    fn run<T: redis::FromRedisValue>(&mut self, words: &[&str]) -> T {
        redis::Cmd::new()
            .arg(words)
            .query(&mut self.observer)
            .unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    fn execute(&mut self, words: &[&str]) {
        let _: Value = self.run(words);
    }

    fn fields(&mut self) -> BTreeMap<String, String> {
        let name = self.name.clone();
        self.run(&["HGETALL", &name])
    }

    fn pttl(&mut self) -> i64 {
        let name = self.name.clone();
        self.run(&["PTTL", &name])
    }

    /// Checks the expiry of a lease that was requested after `begun`.
    #[track_caller]
    fn assert_ttl(&mut self, lease: i64, begun: Instant) {
        let pttl = self.pttl();
        // The server rounds, so a few ms may be missing.
        let least = lease - begun.elapsed().as_millis() as i64 - 5;
        assert!(
            pttl >= least && pttl <= lease,
            "{pttl} ms of {lease} ms are left, less than {least} ms"
        );
    }

    /// Writes Redisson's owner into the key, with an expiry in ms or without one.
    fn put_java_owner(&mut self, count: &str, expiry: Option<i64>) {
        let name = self.name.clone();
        self.execute(&["HSET", &name, JAVA_OWNER, count]);
        if let Some(expiry) = expiry {
            self.execute(&["PEXPIRE", &name, &expiry.to_string()]);
        }
    }

    fn subscribers(&mut self) -> i64 {
        let counts: HashMap<String, i64> =
            self.run(&["PUBSUB", "NUMSUB", &channel(&self.name.clone())]);
        counts.values().sum()
    }

    /// How often each command has been called, by clients and in scripts.
    fn calls(&mut self) -> HashMap<String, u64> {
        calls(&mut self.observer)
    }
}

/// A client that sends nothing by itself: no reply is late, and no re-check is made.
fn quiet() -> LockClientBuilder {
    LockClient::builder()
        .command_timeout(Duration::from_secs(10))
        .recheck_interval(NEVER)
}

fn calls(observer: &mut Connection) -> HashMap<String, u64> {
    let info: String = cmd("INFO").arg("commandstats").query(observer).unwrap();
    info.lines()
        .filter_map(|line| {
            let (command, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            Some((command.to_owned(), rest.split(',').next()?.parse().ok()?))
        })
        .collect()
}

fn channel(name: &str) -> String {
    let tagged = if name.contains('{') {
        name.to_owned()
    } else {
        format!("{{{name}}}")
    };
    format!("redisson_lock__channel:{tagged}")
}

/// A subscriber to all channels.
struct Subscriber(Connection);

impl Subscriber {
    fn new(server: &Server) -> Self {
        let mut connection = server.connection();
        connection
            .send_packed_command(&cmd("PSUBSCRIBE").arg("*").get_packed_command())
            .unwrap();
        connection.recv_response().unwrap();
        Self(connection)
    }

    /// Channels and messages since the last call.
    fn received(&mut self, publisher: &mut Connection) -> Vec<(String, String)> {
        // The server delivers all earlier messages before this one.
        const END: &str = "end";
        cmd("PUBLISH").arg("end").arg(END).exec(publisher).unwrap();
        let mut messages = Vec::new();
        loop {
            let message: [String; 4] =
                redis::from_redis_value(self.0.recv_response().unwrap()).unwrap();
            let [_, _, channel, payload] = message;
            if payload == END {
                return messages;
            }
            messages.push((channel, payload));
        }
    }
}

fn is_owner(field: &str) -> bool {
    let Some((client, thread)) = field.split_once(':') else {
        return false;
    };
    let uuid = client.len() == 36
        && client.char_indices().all(|(at, char)| match at {
            8 | 13 | 18 | 23 => char == '-',
            _ => matches!(char, '0'..='9' | 'a'..='f'),
        });
    let digits = thread.chars().all(|char| char.is_ascii_digit()) && !thread.starts_with('0');
    uuid && digits && thread.parse::<i64>().is_ok_and(|thread| thread > 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn held_lock_is_hash_with_owner_count_and_expiry() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    let begun = Instant::now();
    let guard = bench.lock.lock().await.unwrap();
    assert_eq!(bench.run::<String>(&["TYPE", &name]), "hash");
    assert_eq!(
        bench.run::<Vec<String>>(&["KEYS", "*"]),
        [name],
        "the only key"
    );
    let owner = format!("{}:{}", bench.client.client_id(), guard.owner());
    assert!(is_owner(&owner), "{owner}");
    assert_eq!(bench.fields(), BTreeMap::from([(owner, "1".to_owned())]));
    bench.assert_ttl(WATCHDOG, begun);
    guard.unlock().await.unwrap();
    assert_eq!(bench.run::<i64>(&["DBSIZE"]), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn owner_field_has_redissons_form() {
    let mut bench = Bench::new().await;
    let longest = Owner::from_thread_id(i64::MAX).unwrap();
    let least = Owner::from_thread_id(1).unwrap();
    for owner in [Owner::new(), Owner::new(), least, longest] {
        let guard = bench.lock.lock().with_owner(owner).await.unwrap();
        let fields: Vec<String> = bench.fields().into_keys().collect();
        assert_eq!(
            fields,
            [format!(
                "{}:{}",
                bench.client.client_id(),
                owner.thread_id()
            )]
        );
        assert!(is_owner(&fields[0]), "{fields:?}");
        guard.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn expiry_is_requested_lease() {
    let mut bench = Bench::new().await;
    for lease in [10_000, 60_000, 3650 * 24 * 3600 * 1000] {
        let begun = Instant::now();
        let guard = bench
            .lock
            .lock()
            .lease(Duration::from_millis(lease))
            .await
            .unwrap();
        bench.assert_ttl(lease as i64, begun);
        guard.unlock().await.unwrap();
        let begun = Instant::now();
        let guard = bench
            .lock
            .try_lock()
            .lease(Duration::from_millis(lease))
            .await
            .unwrap()
            .unwrap();
        bench.assert_ttl(lease as i64, begun);
        guard.unlock().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partial_release_lowers_count_and_restores_lease() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    let mut subscriber = Subscriber::new(&bench.server);
    let owner = Owner::new();
    let mut guards = Vec::new();
    for count in 1..=3 {
        guards.push(bench.lock.lock().with_owner(owner).await.unwrap());
        assert_eq!(
            bench.fields().into_values().collect::<Vec<_>>(),
            [count.to_string()]
        );
    }
    for count in (1..=2).rev() {
        bench.execute(&["PEXPIRE", &name, "15000"]);
        let begun = Instant::now();
        guards.pop().unwrap().unlock().await.unwrap();
        assert_eq!(
            bench.fields().into_values().collect::<Vec<_>>(),
            [count.to_string()]
        );
        bench.assert_ttl(WATCHDOG, begun);
    }
    assert_eq!(
        subscriber.received(&mut bench.observer),
        [],
        "a re-entry or a partial release published a message"
    );
    guards.pop().unwrap().unlock().await.unwrap();
    assert_eq!(bench.run::<i64>(&["EXISTS", &name]), 0);
    assert_eq!(
        subscriber.received(&mut bench.observer),
        [(channel(&name), "0".to_owned())]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn release_publishes_once_on_redissons_channel() {
    let mut bench = Bench::new().await;
    let mut subscriber = Subscriber::new(&bench.server);
    for (name, channel) in [
        ("order:42", "redisson_lock__channel:{order:42}"),
        ("order:{42}", "redisson_lock__channel:order:{42}"),
        ("{42}:order", "redisson_lock__channel:{42}:order"),
        ("a{", "redisson_lock__channel:a{"),
        ("a}b", "redisson_lock__channel:{a}b}"),
        ("käse 🧀", "redisson_lock__channel:{käse 🧀}"),
    ] {
        let lock = bench.client.lock(name);
        let expected = [(channel.to_owned(), "0".to_owned())];
        lock.run(async {}).await.unwrap();
        assert_eq!(subscriber.received(&mut bench.observer), expected);
        drop(lock.lock().await.unwrap());
        wait_until("the dropped guard is released", LIMIT, || {
            cmd("EXISTS")
                .arg(name)
                .query::<i64>(&mut bench.observer)
                .unwrap()
                == 0
        });
        assert_eq!(subscriber.received(&mut bench.observer), expected);
        let _ = lock.lock().await.unwrap().detach();
        assert!(lock.force_unlock().await.unwrap());
        assert_eq!(subscriber.received(&mut bench.observer), expected);
        assert!(!lock.force_unlock().await.unwrap());
        assert_eq!(
            subscriber.received(&mut bench.observer),
            [],
            "nothing was freed"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_frees_foreign_lock_and_publishes() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    let mut subscriber = Subscriber::new(&bench.server);
    for expiry in [Some(WATCHDOG), None] {
        bench.put_java_owner("3", expiry);
        assert!(bench.lock.force_unlock().await.unwrap());
        assert_eq!(bench.run::<i64>(&["EXISTS", &name]), 0);
        assert_eq!(
            subscriber.received(&mut bench.observer),
            [(channel(&name), "0".to_owned())]
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_owner_excludes_others_until_its_unlock_message() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    let begun = Instant::now();
    bench.put_java_owner("1", Some(WATCHDOG));
    assert!(bench.lock.try_lock().await.unwrap().is_none());
    let refused = bench.lock.lock().timeout(Duration::from_millis(50)).await;
    assert!(
        matches!(&refused, Err(Error::AcquireTimeout { .. })),
        "{refused:?}"
    );
    assert_eq!(
        bench.fields(),
        BTreeMap::from([(JAVA_OWNER.to_owned(), "1".to_owned())])
    );
    bench.assert_ttl(WATCHDOG, begun);

    let waiting = tokio::spawn(bench.lock.lock().into_future());
    wait_until("the waiter is subscribed", LIMIT, || {
        bench.subscribers() == 1
    });
    bench.execute(&["DEL", &name]);
    bench.execute(&["PUBLISH", &channel(&name), "0"]);
    // The old lease has most of its 30 s left, and there is no re-check: only the message can wake
    // the waiter.
    let guard = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("the message does not wake the waiter")
        .unwrap()
        .unwrap();
    let owner = format!("{}:{}", bench.client.client_id(), guard.owner());
    assert_eq!(bench.fields(), BTreeMap::from([(owner, "1".to_owned())]));
    wait_until("no connection is subscribed", LIMIT, || {
        bench.subscribers() == 0
    });
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn waiter_acquires_when_foreign_lease_expires() {
    let mut bench = Bench::new().await;
    bench.put_java_owner("2", Some(600));
    let guard = tokio::time::timeout(LIMIT, bench.lock.lock())
        .await
        .expect("no attempt after the lease has expired")
        .unwrap();
    assert_eq!(bench.fields().into_values().collect::<Vec<_>>(), ["1"]);
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_owner_that_relocks_first_keeps_lock() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    bench.put_java_owner("1", Some(WATCHDOG));
    let waiting = tokio::spawn(bench.lock.lock().into_future());
    wait_until("the waiter is subscribed", LIMIT, || {
        bench.subscribers() == 1
    });
    for _ in 0..20 {
        // Freed, published and acquired again in one script.
        let scripted = "redis.call('del', KEYS[1]) redis.call('publish', ARGV[1], '0') \
                        redis.call('hset', KEYS[1], ARGV[2], 1) redis.call('pexpire', KEYS[1], 30000)";
        bench.execute(&["EVAL", scripted, "1", &name, &channel(&name), JAVA_OWNER]);
    }
    assert!(!waiting.is_finished());
    assert_eq!(
        bench.fields(),
        BTreeMap::from([(JAVA_OWNER.to_owned(), "1".to_owned())])
    );
    bench.execute(&["DEL", &name]);
    bench.execute(&["PUBLISH", &channel(&name), "0"]);
    let guard = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("the last message does not wake the waiter")
        .unwrap()
        .unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_without_unlock_change_nothing() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    bench.put_java_owner("1", Some(WATCHDOG));
    let waiting = tokio::spawn(bench.lock.lock().into_future());
    wait_until("the waiter is subscribed", LIMIT, || {
        bench.subscribers() == 1
    });
    for message in [
        "0",
        "1",
        "",
        "junk",
        "-1",
        "0\r\n",
        "\u{202e}",
        "99999999999999999999",
    ] {
        for _ in 0..5 {
            bench.execute(&["PUBLISH", &channel(&name), message]);
            bench.execute(&["PUBLISH", "redisson_lock__channel:{another}", message]);
        }
    }
    // Bytes that are not UTF-8.
    cmd("PUBLISH")
        .arg(channel(&name))
        .arg(&[0xff_u8, 0xfe, 0x00])
        .exec(&mut bench.observer)
        .unwrap();
    wait_until("the waiter is still subscribed", LIMIT, || {
        bench.subscribers() == 1
    });
    assert!(
        !waiting.is_finished(),
        "a message without an unlock ended the wait"
    );
    assert_eq!(
        bench.fields(),
        BTreeMap::from([(JAVA_OWNER.to_owned(), "1".to_owned())])
    );
    bench.execute(&["DEL", &name]);
    bench.execute(&["PUBLISH", &channel(&name), "0"]);
    let guard = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("the waiter is not woken any more")
        .unwrap()
        .unwrap();

    // A release message does not change that the owner holds the lock.
    bench.execute(&["PUBLISH", &channel(&name), "0"]);
    assert!(!guard.is_lost());
    assert_eq!(bench.fields().len(), 1);
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn uncontended_lock_costs_two_script_calls() {
    let mut bench = Bench::new().await;
    bench.lock.run(async {}).await.unwrap();
    let before = bench.calls();
    bench.lock.lock().await.unwrap().unlock().await.unwrap();
    let mut cost = calls_between(&before, &bench.calls());
    // The commands inside the two scripts are not counted.
    for inside in ["pttl", "hset", "pexpire", "hget", "del", "publish"] {
        cost.remove(inside);
    }
    assert_eq!(cost, HashMap::from([("evalsha".to_owned(), 2)]));
}

/// How often each command was called in between, except the observer's INFO.
fn calls_between(
    before: &HashMap<String, u64>,
    after: &HashMap<String, u64>,
) -> HashMap<String, u64> {
    after
        .iter()
        .filter(|(command, _)| *command != "info")
        .map(|(command, calls)| (command.clone(), calls - before.get(command).unwrap_or(&0)))
        .filter(|(_, calls)| *calls > 0)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_are_called_by_sha1() {
    let mut bench = Bench::new().await;
    let owner = Owner::new();
    for _ in 0..50 {
        let outer = bench.lock.lock().with_owner(owner).await.unwrap();
        let inner = bench.lock.lock().with_owner(owner).await.unwrap();
        inner.unlock().await.unwrap();
        outer.unlock().await.unwrap();
    }
    assert!(!bench.lock.force_unlock().await.unwrap());
    let calls = bench.calls();
    assert_eq!(calls.get("eval"), None, "{calls:?}");
    assert_eq!(calls["evalsha"], 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn flushed_scripts_are_sent_again() {
    let mut bench = Bench::new().await;
    let other = quiet().connect(&bench.server.url()).await.unwrap();
    for _ in 0..3 {
        bench.execute(&["SCRIPT", "FLUSH"]);
        let guard = bench.lock.lock().await.unwrap();
        bench.execute(&["SCRIPT", "FLUSH"]);
        assert_eq!(
            bench.fields().into_values().collect::<Vec<_>>(),
            ["1"],
            "the lock was acquired once"
        );
        let waiting = tokio::spawn(other.lock(&bench.name).lock().into_future());
        wait_until("the waiter is subscribed", LIMIT, || {
            bench.subscribers() == 1
        });
        bench.execute(&["SCRIPT", "FLUSH"]);
        guard.unlock().await.unwrap();
        let guard = tokio::time::timeout(LIMIT, waiting)
            .await
            .expect("the waiter was not woken")
            .unwrap()
            .unwrap();
        bench.execute(&["SCRIPT", "FLUSH"]);
        assert!(bench.lock.force_unlock().await.unwrap());
        bench.execute(&["SCRIPT", "FLUSH"]);
        let lost = guard.unlock().await;
        assert!(matches!(&lost, Err(Error::Lost { .. })), "{lost:?}");
    }
    // The text of each script is sent once, and its SHA-1 is used again after that.
    let before = bench.calls();
    bench.lock.run(async {}).await.unwrap();
    bench.lock.run(async {}).await.unwrap();
    let cost = calls_between(&before, &bench.calls());
    assert!(*cost.get("eval").unwrap_or(&0) <= 2, "{cost:?}");
    assert!(cost["evalsha"] >= 4, "{cost:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn flushed_renewal_script_is_sent_again_before_lease_expires() {
    let watchdog = Duration::from_millis(900);
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(watchdog)).await;
    let guard = bench.lock.lock().await.unwrap();
    bench.execute(&["SCRIPT", "FLUSH"]);
    let mut before = bench.pttl();
    let mut renewals = 0;
    wait_until("renewals", LIMIT, || {
        let now = bench.pttl();
        assert!(now > 0, "the lock expired");
        renewals += usize::from(now > before + 100);
        before = now;
        renewals == 4
    });
    assert!(!guard.is_lost());
}

#[tokio::test(flavor = "multi_thread")]
async fn inspection_matches_server_state() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let name = bench.name.clone();

    // A free lock.
    let owner = Owner::new();
    let held = || lock.is_held_by(owner);
    let count = || lock.hold_count_of(owner);
    assert!(!lock.is_locked().await.unwrap());
    assert!(!held().await.unwrap());
    assert_eq!(count().await.unwrap(), 0);
    assert_eq!(ttl(&lock).await.unwrap(), None);
    assert_eq!(lock.inspect().await.unwrap(), None);

    // A lock of this client.
    let guards = [
        lock.lock().with_owner(owner).await.unwrap(),
        lock.lock().with_owner(owner).await.unwrap(),
    ];
    assert!(lock.is_locked().await.unwrap());
    assert!(held().await.unwrap());
    assert_eq!(count().await.unwrap(), 2);
    assert!(
        !lock.is_held_by(Owner::new()).await.unwrap(),
        "another owner"
    );
    let left = ttl(&lock).await.unwrap().unwrap().as_millis() as i64;
    let pttl = bench.pttl();
    assert!(
        left >= pttl && left <= WATCHDOG && left - pttl < 5_000,
        "reported: {left} ms, on the server: {pttl} ms"
    );
    let info = lock.inspect().await.unwrap().expect("an owner");
    assert_eq!(info.local_owner, Some(owner));
    assert_eq!(
        (info.owner, info.hold_count.to_string()),
        bench.fields().pop_first().unwrap()
    );
    for guard in guards {
        guard.unlock().await.unwrap();
    }

    // A lock of another client, with an expiry and without.
    for expiry in [Some(20_000), None] {
        bench.put_java_owner("3", expiry);
        assert!(lock.is_locked().await.unwrap());
        assert!(!held().await.unwrap());
        assert_eq!(count().await.unwrap(), 0);
        let left = ttl(&lock).await.unwrap().unwrap();
        match expiry {
            Some(_) => assert!((15_000..=20_000).contains(&left.as_millis()), "{left:?}"),
            None => assert_eq!(left, Duration::MAX),
        }
        let info = lock.inspect().await.unwrap().expect("an owner");
        assert_eq!((info.owner.as_str(), info.hold_count), (JAVA_OWNER, 3));
        assert_eq!(info.local_owner, None);
        bench.execute(&["DEL", &name]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn inspection_of_malformed_key_returns_server_error() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let name = bench.name.clone();
    let owner = Owner::from_thread_id(52).unwrap();
    let field = format!("{}:52", bench.client.client_id());
    let check = |error: Result<(), Error>, what: &str| match error {
        Err(Error::Server {
            lock: Some(lock),
            error,
            ..
        }) => {
            assert_eq!(lock, name);
            assert!(error.message().contains(what), "{error}");
        }
        other => panic!("{other:?}"),
    };

    bench.execute(&["SET", &name, "text"]);
    assert!(
        lock.is_locked().await.unwrap(),
        "no owner can acquire the lock"
    );
    check(lock.is_held_by(owner).await.map(drop), "WRONGTYPE");
    check(lock.hold_count_of(owner).await.map(drop), "WRONGTYPE");
    check(lock.inspect().await.map(drop), "WRONGTYPE");
    assert_eq!(bench.run::<String>(&["GET", &name]), "text");

    for count in ["many", "-1", "1.5", "9223372036854775808"] {
        bench.execute(&["DEL", &name]);
        bench.execute(&["HSET", &name, &field, count]);
        check(lock.is_held_by(owner).await.map(drop), "number");
        check(lock.hold_count_of(owner).await.map(drop), "number");
        check(lock.inspect().await.map(drop), "number");
    }
    bench.execute(&["HSET", &name, &field, "9223372036854775807"]);
    assert_eq!(lock.hold_count_of(owner).await.unwrap(), i64::MAX as u64);
    let over = lock.lock().with_owner(owner).await.map(drop);
    check(over, "limit");
    assert_eq!(
        bench.fields(),
        BTreeMap::from([(field, i64::MAX.to_string())])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn client_uses_database_of_its_url() {
    let mut bench = Bench::new().await;
    let client = quiet()
        .connect(&format!("{}/3", bench.server.url()))
        .await
        .unwrap();
    let guard = client.lock(&bench.name).lock().await.unwrap();
    assert!(
        !bench.lock.is_locked().await.unwrap(),
        "the lock exists in another database"
    );
    let name = bench.name.clone();
    assert_eq!(bench.run::<i64>(&["DBSIZE"]), 0);
    bench.execute(&["SELECT", "3"]);
    assert_eq!(bench.run::<i64>(&["EXISTS", &name]), 1);
    guard.unlock().await.unwrap();
}
