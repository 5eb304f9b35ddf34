//! A master with replicas and sentinels.

// Each test binary includes this module and uses a part of it.
#![allow(dead_code)]

use std::time::Duration;

use redis::{Connection, cmd};

use super::server::{Builder, Server, wait_until};

/// The name of the master.
pub const MASTER: &str = "main";

/// The limit for a fail-over, on a busy machine.
const LIMIT: Duration = Duration::from_secs(90);

/// A master and two replicas, and three sentinels.
pub struct Deployment {
    pub servers: Vec<Server>,
    pub sentinels: Vec<Server>,
}

impl Deployment {
    pub fn start() -> Self {
        Self::start_with(|server| server, |sentinel| sentinel)
    }

    /// The same, with settings of the servers and of the sentinels.
    pub fn start_with(
        server: impl Fn(Builder) -> Builder,
        sentinel: impl Fn(Builder) -> Builder,
    ) -> Self {
        let builder = || Server::builder().arg("--repl-diskless-sync-delay", "0");
        let first = server(builder()).start();
        let port = first.port().to_string();
        let mut servers = vec![first];
        for _ in 0..2 {
            let replica = server(builder()).start();
            let mut redis = replica.connection();
            cmd("REPLICAOF")
                .arg("127.0.0.1")
                .arg(&port)
                .exec(&mut redis)
                .unwrap();
            servers.push(replica);
        }
        let config = format!(
            "sentinel monitor {MASTER} 127.0.0.1 {port} 2\n\
             sentinel down-after-milliseconds {MASTER} 1000\n\
             sentinel failover-timeout {MASTER} 6000\n"
        );
        let sentinels: Vec<_> = (0..3)
            .map(|_| sentinel(Server::builder().sentinel(config.clone())).start())
            .collect();
        for sentinel in &sentinels {
            let mut redis = sentinel.connection();
            wait_until("the sentinel knows all others", LIMIT, || {
                let state = state(&mut redis);
                state("num-slaves") == "2" && state("num-other-sentinels") == "2"
            });
        }
        for replica in &servers[1..] {
            let mut redis = replica.connection();
            wait_until("the replica is in sync", LIMIT, || {
                let info: String = cmd("INFO").arg("replication").query(&mut redis).unwrap();
                info.contains("master_link_status:up")
            });
        }
        Self { servers, sentinels }
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        let nodes: Vec<_> = self
            .sentinels
            .iter()
            .map(|sentinel| format!("127.0.0.1:{}", sentinel.port()))
            .collect();
        format!("redis+sentinel://{}/{MASTER}", nodes.join(","))
    }

    /// The place of the master, as that sentinel knows it.
    pub fn master_by(&self, sentinel: usize) -> usize {
        let port = state(&mut self.sentinels[sentinel].connection())("port");
        let mut servers = self.servers.iter();
        servers
            .position(|server| server.port().to_string() == port)
            .expect("one of the servers")
    }

    /// Waits until the sentinels have replaced the first master, and returns the place of the new
    /// one.
    pub fn failed_over(&self) -> usize {
        wait_until("the sentinels agree on another master", LIMIT, || {
            let now = self.master_by(0);
            now != 0 && (1..3).all(|sentinel| self.master_by(sentinel) == now)
        });
        self.master_by(0)
    }

    /// Has the sentinels replace the master, which works.
    pub fn fail_over(&self) {
        let mut redis = self.sentinels[0].connection();
        // While a fail-over is under way, or no replica is fit, it is refused.
        wait_until("the fail-over begins", LIMIT, || {
            let command = cmd("SENTINEL").arg("FAILOVER").arg(MASTER).clone();
            command.exec(&mut redis).is_ok()
        });
    }
}

/// The fields of `SENTINEL MASTER`.
fn state(redis: &mut Connection) -> impl Fn(&str) -> String + use<> {
    let fields: Vec<String> = cmd("SENTINEL")
        .arg("MASTER")
        .arg(MASTER)
        .query(redis)
        .unwrap();
    move |name| {
        let mut pairs = fields.chunks_exact(2);
        let pair = pairs.find(|pair| pair[0] == name);
        pair.map(|pair| pair[1].clone()).unwrap_or_default()
    }
}
