//! Where the server is and how long to wait for it.

use std::fmt;
use std::time::Duration;

use fred::types::RespVersion;
use fred::types::config::{Config, ConnectionConfig, PerformanceConfig, ReconnectPolicy};
use url::Url;

use crate::error::Error;

/// How the link reaches its server. Its `Debug` shows no secret.
#[derive(Clone)]
pub(crate) struct Settings {
    config: Config,
    connect_timeout: Duration,
    command_timeout: Duration,
}

impl Settings {
    /// Reads a URL, and refuses what this link cannot do as it was asked to.
    pub(crate) fn parse(url: &str, connect_timeout: Duration, command_timeout: Duration) -> Result<Self, Error> {
        // No message repeats the URL: it may carry a password.
        let parsed = Url::parse(url).map_err(|problem| refused(&problem.to_string()))?;
        match parsed.scheme() {
            "redis" | "valkey" => {}
            "rediss" | "valkeys" => {
                return Err(refused(
                    "TLS is not supported yet, and connecting in plain text instead would betray what was asked for",
                ));
            }
            scheme if scheme.contains("cluster") || scheme.contains("sentinel") => {
                return Err(refused("clusters and sentinels are not supported yet"));
            }
            _ => return Err(refused("the scheme is not redis")),
        }
        if parsed.host_str().is_none_or(str::is_empty) {
            return Err(refused("there is no host"));
        }
        if parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(refused("nothing may follow the database number"));
        }
        let mut config = Config::from_url_centralized(url).map_err(|problem| refused(problem.details()))?;
        // Push messages beside replies, and maps as maps (https://github.com/redis/redis-specifications, RESP3).
        config.version = RespVersion::RESP3;
        config.username = config.username.as_deref().map(inline);
        config.password = config.password.as_deref().map(inline);
        Ok(Self { config, connect_timeout, command_timeout })
    }

    pub(super) fn command_timeout(&self) -> Duration {
        self.command_timeout
    }

    /// Host and port, for people.
    pub(super) fn address(&self) -> String {
        let hosts = self.config.server.hosts();
        hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// A client that is configured for locks, not connected yet. One that fails fast makes a wrong address an error at
    /// once; another tries until it succeeds.
    pub(super) fn client(&self, reconnect: Reconnect, fail_fast: bool) -> fred::clients::Client {
        let config = Config { fail_fast, ..self.config.clone() };
        let connection = ConnectionConfig {
            connection_timeout: self.connect_timeout,
            // The greeting is a part of connecting, whatever later commands are given.
            internal_command_timeout: self.connect_timeout,
            // A script whose reply is lost must not be sent again behind our back.
            max_command_attempts: 1,
            max_redirections: 0,
            tcp: fred::types::config::TcpConfig { nodelay: Some(true), ..Default::default() },
            ..Default::default()
        };
        let performance = PerformanceConfig {
            default_command_timeout: self.command_timeout,
            // What does not fit is dropped, and then every waiter has to be woken.
            broadcast_channel_capacity: 16_384,
            ..Default::default()
        };
        let policy = match reconnect {
            Reconnect::ByItself => Some(ReconnectPolicy::new_exponential(0, 5, 250, 2)),
            Reconnect::Never => None,
        };
        fred::clients::Client::new(config, Some(performance), Some(connection), policy)
    }
}

/// What a client does when its connection is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reconnect {
    /// It connects again, and goes on trying.
    ByItself,
    /// It ends: what was sent on the old connection has to be ruled out before anything is sent on a new one.
    Never,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("hosts", &self.config.server.hosts())
            .field("database", &self.config.database)
            .field("connect_timeout", &self.connect_timeout)
            .field("command_timeout", &self.command_timeout)
            .finish_non_exhaustive()
    }
}

/// Writes a user's name or password as the server's inline form of commands reads it back.
///
/// The client library sends `HELLO` inline and does not quote, so a space would end the argument, and a line feed the
/// command: what follows would be run as another one. Inside double quotes the server takes any byte as `\xHH`
/// (<https://redis.io/docs/latest/develop/reference/protocol-spec/#inline-commands>).
fn inline(secret: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\'' | b'\\');
    if !secret.is_empty() && secret.bytes().all(plain) {
        return secret.to_owned();
    }
    let mut quoted = String::from('"');
    for byte in secret.bytes() {
        if plain(byte) {
            quoted.push(char::from(byte));
        } else {
            quoted.push_str(&format!("\\x{byte:02x}"));
        }
    }
    quoted.push('"');
    quoted
}

fn refused(problem: &str) -> Error {
    Error::InvalidConfig {
        setting: "url",
        problem: problem.to_owned(),
        allowed: "redis://[user[:password]@]host[:port][/database]",
    }
}
