//! Where the server is and how long to wait for it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fred::types::RespVersion;
use fred::types::config::{Config, ConnectionConfig, PerformanceConfig, ReconnectPolicy};
use url::{ParseError, Url};

use crate::error::{Error, Step};

/// How the link reaches its server. Its `Debug` shows no secret.
#[derive(Clone)]
pub(crate) struct Settings {
    config: Config,
    connection_name: Arc<str>,
    connect_timeout: Duration,
    command_timeout: Duration,
}

impl Settings {
    /// Reads a URL, and refuses what this link cannot do.
    pub(crate) fn parse(
        url: &str,
        connection_name: String,
        connect_timeout: Duration,
        command_timeout: Duration,
    ) -> Result<Self, Error> {
        // No message repeats the URL: it may contain a password.
        const NO_SCHEME: &str = "it does not begin with redis:// or valkey://";
        const ESCAPES: &str = "a /, ?, # or % in the user or password is not percent-encoded";
        let (scheme, rest) = url.split_once("://").ok_or_else(|| refused(NO_SCHEME))?;
        match scheme.to_ascii_lowercase().as_str() {
            "redis" | "valkey" => {}
            "rediss" | "valkeys" => return Err(refused("TLS is not supported yet")),
            "unix" | "redis+unix" | "valkey+unix" | "redis+socket" => {
                return Err(refused("unix sockets are not supported yet"));
            }
            scheme if scheme.contains("cluster") => {
                return Err(refused("clusters are not supported yet"));
            }
            scheme if scheme.contains("sentinel") => {
                return Err(refused("sentinels are not supported yet"));
            }
            _ => return Err(refused(NO_SCHEME)),
        }
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        if rest[authority.len()..].contains('@') {
            // `redis://:pa/ss@host`: what seems to be the host is a part of the password.
            return Err(refused(ESCAPES));
        }
        let login = authority.rsplit_once('@').map_or("", |(login, _)| login);
        let hosts = authority
            .rsplit_once('@')
            .map_or(authority, |(_, host)| host);
        if !is_percent_encoded(login) {
            return Err(refused(ESCAPES));
        }
        if hosts.contains(',') {
            return Err(refused("several hosts are not supported yet"));
        }
        let parsed = Url::parse(url).map_err(|problem| match problem {
            ParseError::RelativeUrlWithoutBase => refused(NO_SCHEME),
            problem => refused(&problem.to_string()),
        })?;
        if parsed.host_str().is_none_or(str::is_empty) {
            return Err(refused("it has no host"));
        }
        if parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(refused("something follows the database number"));
        }
        let database = parsed.path().strip_prefix('/').unwrap_or_default();
        if !matches!(database.trim_start_matches('/'), "" | "0") && database.parse::<u8>().is_err()
        {
            return Err(refused("the database is not a number from 0 to 255"));
        }
        let mut config =
            Config::from_url_centralized(url).map_err(|problem| refused(problem.details()))?;
        // Push messages beside replies, and maps as maps
        // (https://github.com/redis/redis-specifications, RESP3).
        config.version = RespVersion::RESP3;
        // Each connection begins with database 0, and selecting it needs a right.
        config.database = config.database.filter(|database| *database != 0);
        if config
            .username
            .as_deref()
            .is_some_and(|user| !user.is_empty())
        {
            // The client library names the user only beside a password; one without has the empty
            // one.
            config.password.get_or_insert_default();
        }
        config.username = config.username.as_deref().map(inline);
        config.password = config.password.as_deref().map(inline);
        Ok(Self {
            config,
            connection_name: connection_name.into(),
            connect_timeout,
            command_timeout,
        })
    }

    /// What `CLIENT LIST` shows for the connections.
    pub(super) fn connection_name(&self) -> &str {
        &self.connection_name
    }

    /// The error of a connection that was not made in time.
    pub(crate) fn connect_timed_out(&self) -> Error {
        Error::Timeout {
            step: Step::Connect,
            after: self.connect_timeout,
            lock: None,
            address: Some(self.address()),
        }
    }

    pub(super) fn command_timeout(&self) -> Duration {
        self.command_timeout
    }

    /// Host and port, for people.
    pub(crate) fn address(&self) -> String {
        let hosts = self.config.server.hosts();
        hosts
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// The same for a try to connect that takes no longer than that.
    pub(super) fn within(&self, limit: Duration) -> Self {
        Self {
            connect_timeout: self.connect_timeout.min(limit),
            ..self.clone()
        }
    }

    /// A client that is configured for locks, not connected yet. One that fails fast makes a wrong
    /// address an error at once; another tries until it succeeds.
    pub(super) fn client(&self, reconnect: Reconnect, fail_fast: bool) -> fred::clients::Client {
        let config = Config {
            fail_fast,
            ..self.config.clone()
        };
        let connection = ConnectionConfig {
            connection_timeout: self.connect_timeout,
            // The greeting is a part of connecting, whatever later commands are given.
            internal_command_timeout: self.connect_timeout,
            // A script whose reply is lost must not be sent again behind our back.
            max_command_attempts: 1,
            max_redirections: 0,
            tcp: fred::types::config::TcpConfig {
                nodelay: Some(true),
                ..Default::default()
            },
            ..Default::default()
        };
        let performance = PerformanceConfig {
            default_command_timeout: self.command_timeout,
            // What does not fit is dropped, and then every waiter is woken. Each place takes room
            // from the beginning.
            broadcast_channel_capacity: 256,
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
    /// It ends: what was sent on the old connection has to be ruled out before anything is sent on
    /// a new one.
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
/// The client library sends `HELLO` inline and does not quote, so a space would end the argument,
/// and a line feed the command: what follows would be run as another one. Inside double quotes the
/// server takes any byte as `\xHH`
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

/// Whether each `%` begins an escape of two hexadecimal digits.
fn is_percent_encoded(text: &str) -> bool {
    let bytes = text.as_bytes();
    let is_escape = |at: usize| {
        let digits = bytes.get(at + 1..at + 3);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    (0..bytes.len()).all(|at| bytes[at] != b'%' || is_escape(at))
}

fn refused(problem: &str) -> Error {
    Error::InvalidConfig {
        setting: "url",
        problem: problem.to_owned(),
        allowed: "redis://[user[:password]@]host[:port][/database]",
    }
}

#[cfg(test)]
mod properties {
    use proptest::prelude::*;

    use super::*;

    /// Splits an inline command as the server does (`sdssplitargs` in its `sds.c`).
    fn split(line: &[u8]) -> Option<Vec<Vec<u8>>> {
        let mut words = Vec::new();
        let mut rest = line.trim_ascii_start();
        while !rest.is_empty() {
            let mut word = Vec::new();
            let mut quote = None;
            loop {
                match (quote, rest) {
                    (None, []) => break,
                    (None, [b' ' | b'\n' | b'\r' | b'\t' | 0, ..]) => break,
                    (None, [b'"', ..]) => quote = Some(b'"'),
                    (None, [b'\'', ..]) => quote = Some(b'\''),
                    (Some(_), []) => return None,
                    (Some(b'"'), [b'\\', b'x', high, low, ..])
                        if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
                    {
                        let digits = std::str::from_utf8(&rest[2..4]).expect("ASCII");
                        word.push(u8::from_str_radix(digits, 16).expect("hex"));
                        rest = &rest[3..];
                    }
                    (Some(b'"'), [b'\\', escaped, ..]) => {
                        word.push(match escaped {
                            b'n' => b'\n',
                            b'r' => b'\r',
                            b't' => b'\t',
                            b'b' => 8,
                            b'a' => 7,
                            other => *other,
                        });
                        rest = &rest[1..];
                    }
                    (Some(b'\''), [b'\\', b'\'', ..]) => {
                        word.push(b'\'');
                        rest = &rest[1..];
                    }
                    (Some(closing), [byte, after @ ..]) if *byte == closing => {
                        if after
                            .first()
                            .is_some_and(|next| !next.is_ascii_whitespace())
                        {
                            return None;
                        }
                        rest = after;
                        break;
                    }
                    (_, [byte, ..]) => word.push(*byte),
                }
                rest = &rest[1..];
            }
            words.push(word);
            rest = rest.trim_ascii_start();
        }
        Some(words)
    }

    fn odd_text(longest: usize) -> impl Strategy<Value = String> {
        let odd = prop::sample::select(
            "\0\r\n\t \"'\\:/@?#%xnrt0af\u{7f}\u{85}é"
                .chars()
                .collect::<Vec<_>>(),
        );
        prop::collection::vec(prop_oneof![odd, any::<char>()], 0..longest)
            .prop_map(String::from_iter)
    }

    fn escaped(text: &str) -> String {
        text.bytes().map(|byte| format!("%{byte:02X}")).collect()
    }

    fn parse(url: &str) -> Result<Settings, Error> {
        Settings::parse(
            url,
            "test".into(),
            Duration::from_secs(1),
            Duration::from_secs(1),
        )
    }

    #[test]
    fn the_split_is_the_servers() {
        let split = |line: &str| split(line.as_bytes()).map(|words| words.len());
        assert_eq!(split(r#"HELLO 3 "a b" 'c d' e"f g""#), Some(5));
        assert_eq!(split(r#"AUTH "\x20\"\\""#), Some(2));
        assert_eq!(split(r#"AUTH "a"b"#), None);
        assert_eq!(split(r#"AUTH "a"#), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1_000, ..Default::default() })]

        #[test]
        fn the_server_reads_any_secret_as_it_was(secret in odd_text(20)) {
            let line = format!("HELLO 3 AUTH default {} SETNAME x", inline(&secret));
            prop_assert!(line.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{line:?}");
            let words = split(line.as_bytes()).expect("balanced quotes");
            prop_assert_eq!(words.len(), 7);
            prop_assert_eq!(words[4].as_slice(), secret.as_bytes());
        }

        #[test]
        fn any_login_is_kept_and_not_shown(user in odd_text(8), more in odd_text(8), database in 0..300_u16) {
            const SECRET: &str = "Tr0ub4dor3";
            let password = format!("{SECRET}{more}");
            let url = format!("redis://{}:{}@localhost:6380/{database}", escaped(&user), escaped(&password));
            match parse(&url) {
                Ok(settings) => {
                    prop_assert!(database < 256);
                    let selected = u8::try_from(database).ok().filter(|database| *database != 0);
                    prop_assert_eq!(settings.config.database, selected);
                    let named = (!user.is_empty()).then(|| inline(&user));
                    prop_assert_eq!(&settings.config.username, &named);
                    prop_assert_eq!(&settings.config.password, &Some(inline(&password)));
                    prop_assert_eq!(settings.address(), "localhost:6380");
                    let shown = format!("{settings:?} {settings:#?}");
                    prop_assert!(!shown.contains(SECRET));
                }
                Err(error) => {
                    prop_assert!(database > 255, "{error}");
                    let shown = format!("{error} {error:?}");
                    prop_assert!(!shown.contains(SECRET));
                }
            }
        }

        #[test]
        fn any_text_is_parsed_or_refused(scheme in "(redis(s|-cluster|-sentinel)?|valkeys?|[a-z+]{0,4})", text in odd_text(30)) {
            for url in [&text, &format!("{scheme}://{text}"), &format!("{scheme}:{text}")] {
                if let Err(error) = parse(url) {
                    let is_typed = matches!(error, Error::InvalidConfig { setting: "url", .. });
                    prop_assert!(is_typed, "{error:?}");
                    prop_assert!(!error.to_string().chars().any(char::is_control), "{error:?}");
                }
            }
        }
    }
}
