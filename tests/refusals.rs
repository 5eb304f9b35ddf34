//! What the server refuses, and what is left of it.

mod support;

use std::time::{Duration, Instant};

use redisson_lock::{Error, Holder, HolderExt, LockClient, Step};
use support::proxy::{Fate, Flow, Proxy, Way};
use support::server::{Server, unique};
use tokio::time::sleep;

/// SHA-1s as in lua/v1/CHECKSUMS.
const ACQUIRE: &str = "d70339c3bc26fe5a5e55980d21641902d54932cc";
const FORCE_UNLOCK: &str = "7c80208ee82e062215a0d3cba6b2229cc50d965a";

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn user(redis: &mut redis::Connection, server: &Server) -> String {
    redis::cmd("ACL").arg(&["SETUSER", "w", "on", ">pw", "allkeys", "allchannels", "+@all"]).exec(redis).unwrap();
    server.url().replace("redis://", "redis://w:pw@")
}

/// current-thread runtime for the client; the proxy lives in a runtime of its own.
#[test]
fn an_error_of_another_call_is_not_proved_by_the_reply_to_a_third() {
    let server = Server::start();
    let mut redis = server.connection();
    redis::cmd("ACL")
        .arg(&["SETUSER", "w", "on", ">pw", "resetkeys", "~app:*", "allchannels", "+@all"])
        .exec(&mut redis)
        .unwrap();
    let outside = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let proxy = outside.block_on(Proxy::start(&server));
    let url = proxy.url().replace("redis://", "redis://w:pw@");
    let inside = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let name = format!("app:{}", unique("x"));
    let nap = |m: u64| std::thread::sleep(ms(m)); // blocks the client's runtime on purpose
    let told = inside.block_on(async {
        let client = LockClient::builder().command_timeout(ms(3000)).connect(&url).await.unwrap();
        proxy.next_reply_to(&[ACQUIRE, &name], Fate::Swallow);
        let lock = client.lock(&name);
        let x = tokio::spawn(async move { lock.try_lock().await.map(|g| g.map(|g| g.forget()).is_some()) });
        sleep(ms(50)).await;
        assert!(redis::cmd("EXISTS").arg(&name).query::<bool>(&mut redis).unwrap());
        assert_eq!(proxy.applied(), 1);
        proxy.set(Way::Replies, Flow::Hold);
        let lock = client.lock("zzz");
        let refused = tokio::spawn(async move { lock.try_lock().await.map(drop) });
        sleep(ms(50)).await; // NOPERM for y waits in the proxy
        proxy.set(Way::Requests, Flow::Hold);
        proxy.set(Way::Replies, Flow::Pass); // it goes to x, which sends PING
        sleep(ms(50)).await;
        let lock = client.lock("app:z");
        let third = tokio::spawn(async move { lock.try_lock().await.map(drop) });
        sleep(ms(20)).await; // its script is behind the PING
        proxy.set(Way::Requests, Flow::Pass);
        nap(100); // both replies are there before the client reads
        let told = x.await.unwrap();
        let _ = (refused.await, third.await);
        told
    });
    nap(2000);
    let left: Vec<String> = redis::cmd("HGETALL").arg(&name).query(&mut redis).unwrap();
    let ttl: i64 = redis::cmd("PTTL").arg(&name).query(&mut redis).unwrap();
    assert!(
        !matches!(told, Err(Error::Server { .. })),
        "the acquire ran, and its caller is told {told:?}; two seconds later the server has {left:?} for {ttl} ms"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn who_stands_behind_a_refused_waiter_is_not_told_that_the_server_is_silent() {
    let server = Server::builder().arg("--lua-time-limit", "50").start();
    let mut redis = server.connection();
    let client =
        LockClient::builder().retry_timeout(ms(700)).command_timeout(ms(500)).connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let url = server.url();
    let busy = std::thread::spawn(move || {
        let mut c = redis::Client::open(url.as_str()).unwrap().get_connection().unwrap();
        let _: redis::RedisResult<()> = redis::cmd("EVAL").arg("while true do end").arg(0).query(&mut c);
    });
    sleep(ms(200)).await;
    let mut all = Vec::new();
    for _ in 0..120 {
        all.push(tokio::spawn({
            let lock = lock.clone();
            async move { lock.lock().await.map(drop) }
        }));
    }
    let mut told = Vec::new();
    for one in all {
        told.push(one.await.unwrap());
    }
    redis::cmd("SCRIPT").arg("KILL").exec(&mut redis).unwrap();
    busy.join().unwrap();
    let wrong: Vec<_> = told.iter().filter(|t| matches!(t, Err(Error::Connection { .. }))).collect();
    assert!(
        wrong.is_empty(),
        "the server said BUSY to every question; {} of 120 were told {:?}, the first one {:?}",
        wrong.len(),
        wrong[0],
        told[0]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_renewals_are_no_storm() {
    let server = Server::start();
    let mut redis = server.connection();
    redis::cmd("ACL").arg(&["SETUSER", "w", "on", ">pw", "allkeys", "allchannels", "+@all"]).exec(&mut redis).unwrap();
    let url = server.url().replace("redis://", "redis://w:pw@");
    let client = LockClient::builder().watchdog_timeout(ms(6000)).connect(&url).await.unwrap();
    let mut guards = Vec::new();
    for i in 0..500 {
        guards.push(client.lock(format!("l{i}")).lock().await.unwrap());
    }
    sleep(ms(300)).await;
    redis::cmd("ACL").arg(&["SETUSER", "w", "-evalsha", "-eval"]).exec(&mut redis).unwrap();
    let total = |redis: &mut redis::Connection| -> u64 {
        let info: String = redis::cmd("INFO").arg("stats").query(redis).unwrap();
        info.lines().find_map(|l| l.strip_prefix("total_commands_processed:")).unwrap().trim().parse().unwrap()
    };
    let rejected = |redis: &mut redis::Connection| -> u64 {
        let info: String = redis::cmd("INFO").arg("commandstats").query(redis).unwrap();
        info.lines()
            .find(|l| l.starts_with("cmdstat_evalsha:"))
            .and_then(|l| l.split("rejected_calls=").nth(1)?.split(',').next()?.parse().ok())
            .unwrap_or(0)
    };
    let (t0, r0) = (total(&mut redis), rejected(&mut redis));
    sleep(ms(5000)).await;
    let (t1, r1) = (total(&mut redis), rejected(&mut redis));
    assert!(r1 - r0 < 2000, "500 locks in 5 s: {} scripts were refused, {} other commands", r1 - r0, t1 - t0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_force_unlock_takes_no_later_possession() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let outside = LockClient::connect(&server.url()).await.unwrap();
    let mut stolen = 0;
    for _ in 0..20 {
        let lock = client.lock(unique("stock"));
        let name = lock.name().unwrap();
        let holder = Holder::new();
        let task = {
            let lock = lock.clone();
            let first = async { lock.lock().await.unwrap() }.with_holder(holder).await;
            tokio::spawn(
                async move {
                    first.lost().await;
                    drop(first);
                    lock.lock().await.unwrap()
                }
                .with_holder(holder),
            )
        };
        sleep(ms(20)).await;
        proxy.next_reply_to(&[FORCE_UNLOCK], Fate::Close);
        let freed = lock.force_unlock().await;
        let second = task.await.unwrap();
        sleep(ms(50)).await;
        let rival = outside.lock(&name).try_lock().await.unwrap();
        if !second.is_lost() && rival.is_some() {
            stolen += 1;
            println!("freed {freed:?}: a rival is in, the guard knows nothing");
        }
        proxy.no_more_fates();
    }
    assert_eq!(stolen, 0, "of 20: later possessions taken, and the holder in this client not told");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_force_unlock_fails_as_documented() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    let client =
        LockClient::builder().command_timeout(ms(300)).retry_timeout(ms(300)).connect(&proxy.url()).await.unwrap();
    proxy.set(Way::Both, Flow::Hold);
    let told = client.lock("x").force_unlock().await;
    assert!(matches!(told, Err(Error::Timeout { step: Step::Inspect, .. })), "{told:?}");
}

/// a cluster as Valkey 8 and 9 name it (`server_mode`).
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_of_valkey_is_refused() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = Server::builder().arg("--cluster-enabled", "yes").start();
    assert!(LockClient::connect(&server.url()).await.is_err(), "as Redis names it");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let to = server.url().rsplit(':').next().unwrap().parse::<u16>().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut server = tokio::net::TcpStream::connect(("127.0.0.1", to)).await.unwrap();
                let (mut cr, mut cw) = client.split();
                let (mut sr, mut sw) = server.split();
                tokio::join!(
                    async {
                        let _ = tokio::io::copy(&mut cr, &mut sw).await;
                    },
                    async {
                        let mut b = vec![0; 65536];
                        while let Ok(n @ 1..) = sr.read(&mut b).await {
                            // Of the same length: one letter less in a line that nobody reads.
                            let s = String::from_utf8_lossy(&b[..n])
                                .replace("redis_mode:cluster", "server_mode:cluster")
                                .replace("redis_git_dirty:", "redis_git_dirt:");
                            if cw.write_all(s.as_bytes()).await.is_err() {
                                return;
                            }
                        }
                    }
                );
            });
        }
    });
    let told = LockClient::connect(&format!("redis://127.0.0.1:{port}")).await;
    assert!(
        matches!(told, Err(Error::InvalidConfig { .. })),
        "connected to a cluster: {told:?}; a lock there: {:?}",
        told.as_ref().unwrap().lock("a").lock().await
    );
}
/// a release that the server refused, then the same adopted holder locks again.
#[tokio::test]
async fn after_a_refused_unlock_one_unlock_frees() {
    let server = Server::start();
    let mut redis = server.connection();
    let url = user(&mut redis, &server);
    let client = LockClient::connect(&url).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().unwrap();
    async {
        let first = lock.lock().await.unwrap();
        redis::cmd("ACL").arg(&["SETUSER", "w", "-del", "-hdel"]).exec(&mut redis).unwrap();
        assert!(matches!(first.unlock().await, Err(Error::Server { .. })));
        redis::cmd("ACL").arg(&["SETUSER", "w", "+@all"]).exec(&mut redis).unwrap();
        let second = lock.lock().await.unwrap();
        second.unlock().await.unwrap();
    }
    .with_holder(Holder::from_thread_id(7).unwrap())
    .await;
    sleep(ms(200)).await;
    let left: Vec<String> = redis::cmd("HGETALL").arg(&name).query(&mut redis).unwrap();
    assert!(left.is_empty(), "no guard is left, the server has {left:?}");
}

/// a force unlock that the server refused, then the same adopted holder locks again.
#[tokio::test]
async fn after_a_refused_force_unlock_one_unlock_frees() {
    let server = Server::start();
    let mut redis = server.connection();
    let url = user(&mut redis, &server);
    let client = LockClient::connect(&url).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().unwrap();
    async {
        let first = lock.lock().await.unwrap();
        redis::cmd("ACL").arg(&["SETUSER", "w", "-del"]).exec(&mut redis).unwrap();
        assert!(matches!(lock.force_unlock().await, Err(Error::Server { .. })));
        redis::cmd("ACL").arg(&["SETUSER", "w", "+@all"]).exec(&mut redis).unwrap();
        assert!(matches!(first.unlock().await, Err(Error::Lost { .. })));
        let second = lock.lock().await.unwrap();
        second.unlock().await.unwrap();
    }
    .with_holder(Holder::from_thread_id(7).unwrap())
    .await;
    sleep(ms(200)).await;
    let left: Vec<String> = redis::cmd("HGETALL").arg(&name).query(&mut redis).unwrap();
    assert!(left.is_empty(), "no guard is left, the server has {left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn connecting_takes_no_longer_than_its_timeout() {
    let server = Server::start();
    let proxy = Proxy::start(&server).await;
    // The reply to the second INFO server, ours, is lost (the first is the client library's).
    proxy.next_reply_to(&["SCRIPT", "LOAD"], Fate::Swallow);
    let began = Instant::now();
    let told = LockClient::builder().connect_timeout(ms(500)).connect(&proxy.url()).await;
    assert!(began.elapsed() < ms(1500), "{:?} instead of 500 ms: {told:?}", began.elapsed());
}

/// an adopted holder whose fixed lease ran out by the clock and who locks again within the margin.
#[tokio::test]
async fn one_unlock_frees_for_a_holder_that_lost_and_locked_again_at_once() {
    let server = Server::start();
    let mut redis = server.connection();
    let client = LockClient::builder().watchdog_timeout(ms(10_000)).connect(&server.url()).await.unwrap();
    let lock = client.lock(unique("stock"));
    let name = lock.name().unwrap();
    let holder = Holder::from_thread_id(7).unwrap();
    async {
        let first = lock.lock().lease(ms(4000)).await.unwrap();
        first.lost().await; // 3.8 s: 200 ms before the key expires
        assert!(matches!(first.unlock().await, Err(Error::Lost { .. })));
        let second = lock.lock().lease(ms(5000)).await.unwrap();
        second.unlock().await.unwrap();
    }
    .with_holder(holder)
    .await;
    sleep(ms(300)).await;
    let left: Vec<String> = redis::cmd("HGETALL").arg(&name).query(&mut redis).unwrap();
    assert!(left.is_empty(), "after the only guard was unlocked the server still has {left:?}");
}
