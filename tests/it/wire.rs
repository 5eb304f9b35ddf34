//! What the library leaves on the server, and what it makes of what others leave there: Redisson's
//! data.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use crate::support::observe::ttl;
use crate::support::server::{Server, unique, wait_until};
use redis::{Connection, Value, cmd};
use redisson_lock::{Error, LockClient, LockClientBuilder, Owner, OwnerExt, ReentrantLock};

/// How long anything may take that needs no lease to run out; far below the leases that the tests
/// leave alone.
const LIMIT: Duration = Duration::from_secs(10);

/// Longer than any test: what depends on it has failed.
const NEVER: Duration = Duration::from_secs(3600);

/// The watchdog timeout, which the tests leave as it is, ms.
const WATCHDOG: i64 = 30_000;

/// A field as Redisson writes it.
const JAVA: &str = "6f1b5cd0-7c40-4f0a-9e0d-2b7a3c1d9e11:52";

/// A server, a client with one lock, and an independent connection that sees what is there.
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

    fn do_(&mut self, words: &[&str]) {
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

    /// Checks the expiry of a lease that was asked for after `begun`.
    #[track_caller]
    fn assert_ttl(&mut self, lease: i64, begun: Instant) {
        let pttl = self.pttl();
        // The server rounds, so a few ms may be missing.
        let least = lease - begun.elapsed().as_millis() as i64 - 5;
        assert!(
            pttl >= least && pttl <= lease,
            "{pttl} ms of {lease} ms are left, not even {least} ms"
        );
    }

    /// An owner that no library of ours made, with an expiry in ms or without one.
    fn put_java(&mut self, count: &str, expiry: Option<i64>) {
        let name = self.name.clone();
        self.do_(&["HSET", &name, JAVA, count]);
        if let Some(expiry) = expiry {
            self.do_(&["PEXPIRE", &name, &expiry.to_string()]);
        }
    }

    fn subscribers(&mut self) -> i64 {
        let counts: HashMap<String, i64> =
            self.run(&["PUBSUB", "NUMSUB", &channel(&self.name.clone())]);
        counts.values().sum()
    }

    /// How often each command was called so far, by clients and in scripts.
    fn calls(&mut self) -> HashMap<String, u64> {
        calls(&mut self.observer)
    }
}

/// A client that sends nothing by itself, as no reply is late and nothing is looked after.
fn quiet() -> LockClientBuilder {
    LockClient::builder()
        .command_timeout(Duration::from_secs(60))
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

/// A subscriber to everything.
struct Listener(Connection);

impl Listener {
    fn new(server: &Server) -> Self {
        let mut connection = server.connection();
        connection
            .send_packed_command(&cmd("PSUBSCRIBE").arg("*").get_packed_command())
            .unwrap();
        connection.recv_response().unwrap();
        Self(connection)
    }

    /// Channels and messages since the last time.
    fn heard(&mut self, publisher: &mut Connection) -> Vec<(String, String)> {
        // All that was published before comes before this one.
        const END: &str = "that is all";
        cmd("PUBLISH").arg("end").arg(END).exec(publisher).unwrap();
        let mut heard = Vec::new();
        loop {
            let message: [String; 4] =
                redis::from_redis_value(self.0.recv_response().unwrap()).unwrap();
            let [_, _, channel, payload] = message;
            if payload == END {
                return heard;
            }
            heard.push((channel, payload));
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
async fn a_held_lock_is_a_hash_with_the_owner_its_count_and_an_expiry() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    let begun = Instant::now();
    let guard = bench.lock.lock().await.unwrap();
    assert_eq!(bench.run::<String>(&["TYPE", &name]), "hash");
    assert_eq!(
        bench.run::<Vec<String>>(&["KEYS", "*"]),
        [name],
        "nothing else is left"
    );
    let owner = format!("{}:{}", bench.client.client_id(), guard.owner());
    assert!(is_owner(&owner), "{owner}");
    assert_eq!(bench.fields(), BTreeMap::from([(owner, "1".to_owned())]));
    bench.assert_ttl(WATCHDOG, begun);
    guard.unlock().await.unwrap();
    assert_eq!(bench.run::<i64>(&["DBSIZE"]), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_owner_is_written_as_redisson_writes_a_thread() {
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
async fn the_expiry_is_the_lease_that_was_asked_for() {
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
async fn the_count_goes_up_and_down_and_a_partial_release_restores_the_lease() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    let mut listener = Listener::new(&bench.server);
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
        bench.do_(&["PEXPIRE", &name, "15000"]);
        let begun = Instant::now();
        guards.pop().unwrap().unlock().await.unwrap();
        assert_eq!(
            bench.fields().into_values().collect::<Vec<_>>(),
            [count.to_string()]
        );
        bench.assert_ttl(WATCHDOG, begun);
    }
    assert_eq!(
        listener.heard(&mut bench.observer),
        [],
        "neither re-entry nor partial release is news to others"
    );
    guards.pop().unwrap().unlock().await.unwrap();
    assert_eq!(bench.run::<i64>(&["EXISTS", &name]), 0);
    assert_eq!(
        listener.heard(&mut bench.observer),
        [(channel(&name), "0".to_owned())]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_publishes_once_on_the_channel_of_redissons_brace_rule() {
    let mut bench = Bench::new().await;
    let mut listener = Listener::new(&bench.server);
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
        assert_eq!(listener.heard(&mut bench.observer), expected);
        drop(lock.lock().await.unwrap());
        wait_until("the dropped guard is released", LIMIT, || {
            cmd("EXISTS")
                .arg(name)
                .query::<i64>(&mut bench.observer)
                .unwrap()
                == 0
        });
        assert_eq!(listener.heard(&mut bench.observer), expected);
        let _ = lock.lock().await.unwrap().detach();
        assert!(lock.force_unlock().await.unwrap());
        assert_eq!(listener.heard(&mut bench.observer), expected);
        assert!(!lock.force_unlock().await.unwrap());
        assert_eq!(listener.heard(&mut bench.observer), [], "nothing was freed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn force_unlock_frees_a_foreign_lock_and_tells() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    let mut listener = Listener::new(&bench.server);
    for expiry in [Some(WATCHDOG), None] {
        bench.put_java("3", expiry);
        assert!(bench.lock.force_unlock().await.unwrap());
        assert_eq!(bench.run::<i64>(&["EXISTS", &name]), 0);
        assert_eq!(
            listener.heard(&mut bench.observer),
            [(channel(&name), "0".to_owned())]
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_owner_is_respected_and_its_unlock_wakes_a_waiter() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    let begun = Instant::now();
    bench.put_java("1", Some(WATCHDOG));
    assert!(bench.lock.try_lock().await.unwrap().is_none());
    let refused = bench.lock.lock().timeout(Duration::from_millis(50)).await;
    assert!(
        matches!(&refused, Err(Error::AcquireTimeout { .. })),
        "{refused:?}"
    );
    assert_eq!(
        bench.fields(),
        BTreeMap::from([(JAVA.to_owned(), "1".to_owned())])
    );
    bench.assert_ttl(WATCHDOG, begun);

    let waiting = tokio::spawn(bench.lock.lock().into_future());
    wait_until("it waits", LIMIT, || bench.subscribers() == 1);
    bench.do_(&["DEL", &name]);
    bench.do_(&["PUBLISH", &channel(&name), "0"]);
    // The old lease has most of its 30 s to go, and there is no re-check: only the message can have
    // done it.
    let guard = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("the message wakes")
        .unwrap()
        .unwrap();
    let owner = format!("{}:{}", bench.client.client_id(), guard.owner());
    assert_eq!(bench.fields(), BTreeMap::from([(owner, "1".to_owned())]));
    wait_until("nobody listens any more", LIMIT, || {
        bench.subscribers() == 0
    });
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_owner_that_dies_is_waited_for_until_its_lease_is_over() {
    let mut bench = Bench::new().await;
    bench.put_java("2", Some(600));
    let guard = tokio::time::timeout(LIMIT, bench.lock.lock())
        .await
        .expect("no message, no re-check")
        .unwrap();
    assert_eq!(bench.fields().into_values().collect::<Vec<_>>(), ["1"]);
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_owner_that_locks_again_before_the_waiter_goes_on_being_respected() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    bench.put_java("1", Some(WATCHDOG));
    let waiting = tokio::spawn(bench.lock.lock().into_future());
    wait_until("it waits", LIMIT, || bench.subscribers() == 1);
    for _ in 0..20 {
        // Freed, told and taken again in one step.
        let scripted = "redis.call('del', KEYS[1]) redis.call('publish', ARGV[1], '0') \
                        redis.call('hset', KEYS[1], ARGV[2], 1) redis.call('pexpire', KEYS[1], 30000)";
        bench.do_(&["EVAL", scripted, "1", &name, &channel(&name), JAVA]);
    }
    assert!(!waiting.is_finished());
    assert_eq!(
        bench.fields(),
        BTreeMap::from([(JAVA.to_owned(), "1".to_owned())])
    );
    bench.do_(&["DEL", &name]);
    bench.do_(&["PUBLISH", &channel(&name), "0"]);
    let guard = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("the last message wakes")
        .unwrap()
        .unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_without_an_unlock_do_no_harm() {
    let mut bench = Bench::new().await;
    let name = bench.name.clone();
    bench.put_java("1", Some(WATCHDOG));
    let waiting = tokio::spawn(bench.lock.lock().into_future());
    wait_until("it waits", LIMIT, || bench.subscribers() == 1);
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
            bench.do_(&["PUBLISH", &channel(&name), message]);
            bench.do_(&["PUBLISH", "redisson_lock__channel:{another}", message]);
        }
    }
    // Bytes that are no text.
    cmd("PUBLISH")
        .arg(channel(&name))
        .arg(&[0xff_u8, 0xfe, 0x00])
        .exec(&mut bench.observer)
        .unwrap();
    wait_until("it still listens", LIMIT, || bench.subscribers() == 1);
    assert!(!waiting.is_finished(), "a message is no unlock");
    assert_eq!(
        bench.fields(),
        BTreeMap::from([(JAVA.to_owned(), "1".to_owned())])
    );
    bench.do_(&["DEL", &name]);
    bench.do_(&["PUBLISH", &channel(&name), "0"]);
    let guard = tokio::time::timeout(LIMIT, waiting)
        .await
        .expect("it can still be woken")
        .unwrap()
        .unwrap();

    // An owner that is told "unlocked" is the owner all the same.
    bench.do_(&["PUBLISH", &channel(&name), "0"]);
    assert!(!guard.is_lost());
    assert_eq!(bench.fields().len(), 1);
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_uncontended_lock_costs_two_script_calls_and_nothing_else() {
    let mut bench = Bench::new().await;
    bench.lock.run(async {}).await.unwrap();
    let before = bench.calls();
    bench.lock.lock().await.unwrap().unlock().await.unwrap();
    let mut cost = spent(&before, &bench.calls());
    // What the two scripts do on the server is the server's affair.
    for inside in ["pttl", "hset", "pexpire", "hget", "del", "publish"] {
        cost.remove(inside);
    }
    assert_eq!(cost, HashMap::from([("evalsha".to_owned(), 2)]));
}

/// Which commands were called in between, by anybody but the observer's INFO.
fn spent(before: &HashMap<String, u64>, after: &HashMap<String, u64>) -> HashMap<String, u64> {
    after
        .iter()
        .filter(|(command, _)| *command != "info")
        .map(|(command, calls)| (command.clone(), calls - before.get(command).unwrap_or(&0)))
        .filter(|(_, calls)| *calls > 0)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_are_called_by_their_sha1() {
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
async fn scripts_that_the_server_forgot_are_sent_again() {
    let mut bench = Bench::new().await;
    let other = quiet().connect(&bench.server.url()).await.unwrap();
    for _ in 0..3 {
        bench.do_(&["SCRIPT", "FLUSH"]);
        let guard = bench.lock.lock().await.unwrap();
        bench.do_(&["SCRIPT", "FLUSH"]);
        assert_eq!(
            bench.fields().into_values().collect::<Vec<_>>(),
            ["1"],
            "once, not twice"
        );
        let waiting = tokio::spawn(other.lock(&bench.name).lock().into_future());
        wait_until("somebody waits", LIMIT, || bench.subscribers() == 1);
        bench.do_(&["SCRIPT", "FLUSH"]);
        guard.unlock().await.unwrap();
        let guard = tokio::time::timeout(LIMIT, waiting)
            .await
            .expect("woken")
            .unwrap()
            .unwrap();
        bench.do_(&["SCRIPT", "FLUSH"]);
        assert!(bench.lock.force_unlock().await.unwrap());
        bench.do_(&["SCRIPT", "FLUSH"]);
        let lost = guard.unlock().await;
        assert!(matches!(&lost, Err(Error::Lost { .. })), "{lost:?}");
    }
    // Each script's text went over the wire, and from then on its SHA-1 does again.
    let before = bench.calls();
    bench.lock.run(async {}).await.unwrap();
    bench.lock.run(async {}).await.unwrap();
    let cost = spent(&before, &bench.calls());
    assert!(*cost.get("eval").unwrap_or(&0) <= 2, "{cost:?}");
    assert!(cost["evalsha"] >= 4, "{cost:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_renewal_script_is_sent_again_before_the_lease_is_over() {
    let watchdog = Duration::from_millis(900);
    let mut bench = Bench::with(LockClient::builder().watchdog_timeout(watchdog)).await;
    let guard = bench.lock.lock().await.unwrap();
    bench.do_(&["SCRIPT", "FLUSH"]);
    let mut before = bench.pttl();
    let mut renewals = 0;
    wait_until("renewals", LIMIT, || {
        let now = bench.pttl();
        assert!(now > 0, "the lock ran out");
        renewals += usize::from(now > before + 100);
        before = now;
        renewals == 4
    });
    assert!(!guard.is_lost());
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_agree_with_the_keys() {
    let mut bench = Bench::new().await;
    let lock = bench.lock.clone();
    let name = bench.name.clone();

    // An absent lock.
    let owner = Owner::new();
    let held = || lock.is_held_by(owner);
    let count = || lock.hold_count_of(owner);
    assert!(!lock.is_locked().await.unwrap());
    assert!(!held().await.unwrap());
    assert_eq!(count().await.unwrap(), 0);
    assert_eq!(ttl(&lock).await.unwrap(), None);
    assert_eq!(lock.inspect().await.unwrap(), None);

    // Our own.
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
        "{left} told, {pttl} there"
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

    // Somebody else's, with an expiry and without.
    for expiry in [Some(20_000), None] {
        bench.put_java("3", expiry);
        assert!(lock.is_locked().await.unwrap());
        assert!(!held().await.unwrap());
        assert_eq!(count().await.unwrap(), 0);
        let left = ttl(&lock).await.unwrap().unwrap();
        match expiry {
            Some(_) => assert!((15_000..=20_000).contains(&left.as_millis()), "{left:?}"),
            None => assert_eq!(left, Duration::MAX),
        }
        let info = lock.inspect().await.unwrap().expect("an owner");
        assert_eq!((info.owner.as_str(), info.hold_count), (JAVA, 3));
        assert_eq!(info.local_owner, None);
        bench.do_(&["DEL", &name]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_about_what_is_no_lock_are_errors_where_they_cannot_be_answered() {
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

    bench.do_(&["SET", &name, "text"]);
    assert!(lock.is_locked().await.unwrap(), "nobody can take it");
    check(lock.is_held_by(owner).await.map(drop), "WRONGTYPE");
    check(lock.hold_count_of(owner).await.map(drop), "WRONGTYPE");
    check(lock.inspect().await.map(drop), "WRONGTYPE");
    assert_eq!(bench.run::<String>(&["GET", &name]), "text");

    for count in ["many", "-1", "1.5", "9223372036854775808"] {
        bench.do_(&["DEL", &name]);
        bench.do_(&["HSET", &name, &field, count]);
        check(lock.is_held_by(owner).await.map(drop), "number");
        check(lock.hold_count_of(owner).await.map(drop), "number");
        check(lock.inspect().await.map(drop), "number");
    }
    bench.do_(&["HSET", &name, &field, "9223372036854775807"]);
    assert_eq!(lock.hold_count_of(owner).await.unwrap(), i64::MAX as u64);
    let over = lock.lock().with_owner(owner).await.map(drop);
    check(over, "limit");
    assert_eq!(
        bench.fields(),
        BTreeMap::from([(field, i64::MAX.to_string())])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_uses_the_database_of_its_url() {
    let mut bench = Bench::new().await;
    let client = quiet()
        .connect(&format!("{}/3", bench.server.url()))
        .await
        .unwrap();
    let guard = client.lock(&bench.name).lock().await.unwrap();
    assert!(
        !bench.lock.is_locked().await.unwrap(),
        "another database is another world"
    );
    let name = bench.name.clone();
    assert_eq!(bench.run::<i64>(&["DBSIZE"]), 0);
    bench.do_(&["SELECT", "3"]);
    assert_eq!(bench.run::<i64>(&["EXISTS", &name]), 1);
    guard.unlock().await.unwrap();
}
