//! Shared by the benchmarks: a server, bare script calls as baselines, and medians.

// Each benchmark includes this module and uses a part of it.
#![allow(dead_code)]

use std::time::Duration;

use bytes::Bytes;
use fred::clients::Client;
use fred::interfaces::ClientLike;
use fred::types::config::{
    Config, ConnectionConfig, PerformanceConfig, ReconnectPolicy, TcpConfig,
};
use fred::types::{ClusterHash, CustomCommand, Resp3Frame, RespVersion, Value};
use redis::aio::MultiplexedConnection;
use tokio::runtime::{Builder, Runtime};

#[path = "../../tests/support/server.rs"]
pub mod server;

/// A script that costs the server almost nothing, so that its call measures the round trip.
pub const TRIVIAL: &str = "return 1";

/// A runtime with the same number of worker threads on every machine, so that runs on different
/// machines are comparable.
pub fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Script calls through fred, with the settings of the library's link but without its other work.
#[derive(Clone)]
pub struct Fred(Client);

impl Fred {
    pub async fn connect(url: &str) -> Self {
        const REPLY: Duration = Duration::from_secs(3);
        let mut config = Config::from_url_centralized(url).expect("a URL");
        config.version = RespVersion::RESP3;
        let connection = ConnectionConfig {
            internal_command_timeout: REPLY,
            max_command_attempts: 1,
            max_redirections: 0,
            tcp: TcpConfig {
                nodelay: Some(true),
                ..Default::default()
            },
            ..Default::default()
        };
        let performance = PerformanceConfig {
            default_command_timeout: REPLY,
            ..Default::default()
        };
        let policy = ReconnectPolicy::new_exponential(0, 5, 250, 2);
        let client = Client::new(config, Some(performance), Some(connection), Some(policy));
        // The connection stays open until the process ends.
        drop(client.init().await.expect("a connection"));
        Self(client)
    }

    pub async fn call(&self, sha1: &str, key: &Bytes, args: &[Bytes]) -> Resp3Frame {
        let command = CustomCommand::new_static("EVALSHA", ClusterHash::Random, false);
        let mut all = Vec::with_capacity(args.len() + 3);
        all.push(Value::from(sha1));
        all.push(Value::Integer(1));
        all.push(Value::Bytes(key.clone()));
        all.extend(args.iter().cloned().map(Value::Bytes));
        self.0.custom_raw(command, all).await.expect("a reply")
    }
}

/// Script calls through redis-rs, a client library that the locks do not use.
#[derive(Clone)]
pub struct Plain(MultiplexedConnection);

impl Plain {
    pub async fn connect(url: &str) -> Self {
        let client = redis::Client::open(url).expect("a URL");
        Self(
            client
                .get_multiplexed_async_connection()
                .await
                .expect("a connection"),
        )
    }

    /// Runs a script.
    pub async fn script(&mut self, sha1: &str, key: &[u8], args: &[&[u8]]) {
        let mut call = redis::cmd("EVALSHA");
        call.arg(sha1).arg(1).arg(key).arg(args);
        let _: redis::Value = call.query_async(&mut self.0).await.expect("a reply");
    }

    /// Runs the trivial script.
    pub async fn call(&mut self, sha1: &str, key: &[u8]) {
        let reply: i64 = redis::cmd("EVALSHA")
            .arg(sha1)
            .arg(1)
            .arg(key)
            .query_async(&mut self.0)
            .await
            .expect("a reply");
        assert_eq!(reply, 1);
    }
}

/// Loads a script, and returns its SHA-1.
pub fn load(connection: &mut redis::Connection, text: &str) -> String {
    redis::cmd("SCRIPT")
        .arg("LOAD")
        .arg(text)
        .query(connection)
        .expect("a SHA-1")
}

/// A number from `INFO`, such as `cmdstat_evalsha:calls=` in the section `commandstats`; 0 if it is
/// missing.
pub fn info(connection: &mut redis::Connection, section: &str, name: &str) -> u64 {
    let info: String = redis::cmd("INFO")
        .arg(section)
        .query(connection)
        .expect("INFO");
    let value = info
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or("0");
    let digits = value
        .split(|c: char| !c.is_ascii_digit())
        .next()
        .unwrap_or_default();
    digits.parse().expect("a number")
}

/// The server's product and version.
pub fn version(connection: &mut redis::Connection) -> String {
    let info: String = redis::cmd("INFO")
        .arg("server")
        .query(connection)
        .expect("INFO");
    let field = |name: &str| {
        info.lines()
            .find_map(|line| line.strip_prefix(name))
            .map(str::trim)
    };
    match (field("valkey_version:"), field("redis_version:")) {
        (Some(version), _) => format!("Valkey {version}"),
        (None, version) => format!("Redis {}", version.unwrap_or("of an unknown version")),
    }
}

/// The value below which this share of the values lies.
pub fn percentile(values: &mut [f64], share: f64) -> f64 {
    assert!(!values.is_empty(), "no values");
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

pub fn median(values: &mut [f64]) -> f64 {
    percentile(values, 0.5)
}
