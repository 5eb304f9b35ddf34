//! The settings of a link: the server's address, the login, and the timeouts.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fred::types::RespVersion;
use fred::types::config::{Config, ConnectionConfig, PerformanceConfig, Server, ServerConfig};
use url::{ParseError, Url};

use super::Limit;
use super::sentinel::Sentinels;
use crate::error::{Error, Step};

/// How a link connects to its server. `Debug` shows no secret.
#[derive(Clone)]
pub(crate) struct Settings {
    config: Config,
    connection_name: Arc<str>,
    connect_timeout: Duration,
    limit: Arc<Limit>,
    /// Whether the URL asks for TLS.
    is_secure: bool,
    /// They are asked for the server before each connection.
    sentinels: Option<Sentinels>,
}

impl Settings {
    /// Parses a URL. Refuses those that name an unsupported kind of connection.
    pub(crate) fn parse(
        url: &str,
        connection_name: String,
        connect_timeout: Duration,
        limit: Arc<Limit>,
    ) -> Result<Self, Error> {
        // No message repeats the URL: it may contain a password.
        const NO_SCHEME: &str =
            "it does not begin with redis://, rediss://, valkey:// or valkeys://";
        const ESCAPES: &str = "a /, ?, # or % in the user or password is not percent-encoded";
        // As URL parsers do: spaces and control characters around a URL do not count, nor do tabs
        // and line ends in it.
        let text: String = url
            .trim_matches(|c: char| c <= ' ')
            .chars()
            .filter(|c| !matches!(c, '\t' | '\n' | '\r'))
            .collect();
        let (scheme, rest) = text.split_once("://").ok_or_else(|| refused(NO_SCHEME))?;
        let scheme = scheme.to_ascii_lowercase();
        let (plain, has_sentinels) = match scheme.strip_suffix("+sentinel") {
            Some(plain) => (plain, true),
            None => (&*scheme, false),
        };
        let is_secure = match plain {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" if cfg!(feature = "tls") => true,
            "rediss" | "valkeys" => {
                return Err(refused("TLS needs the feature `tls` of redisson-lock"));
            }
            "unix" | "redis+unix" | "valkey+unix" | "redis+socket" => {
                return Err(refused("unix sockets are not supported yet"));
            }
            scheme if scheme.contains("cluster") => {
                return Err(refused("clusters are not supported yet"));
            }
            scheme if scheme.contains("sentinel") => {
                return Err(refused("a URL for sentinels begins with redis+sentinel://"));
            }
            _ => return Err(refused(NO_SCHEME)),
        };
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        // `redis://:pa/ss@host`: what seems to be the host is a part of the password.
        if rest[authority.len()..].contains('@') && !is_host_and_database(authority, rest) {
            return Err(refused(ESCAPES));
        }
        let login = authority.rsplit_once('@').map_or("", |(login, _)| login);
        let hosts = authority
            .rsplit_once('@')
            .map_or(authority, |(_, host)| host);
        if !is_percent_encoded(login) {
            return Err(refused(ESCAPES));
        }
        if has_sentinels {
            let path = &rest[authority.len()..];
            return Self::parse_sentinels(login, hosts, path, &|rest| {
                let scheme = if is_secure { "rediss" } else { "redis" };
                let url = format!("{scheme}://{rest}");
                let limit = Arc::clone(&limit);
                Self::parse(&url, connection_name.clone(), connect_timeout, limit)
            });
        }
        if hosts.contains(',') {
            return Err(refused("several hosts need redis+sentinel://"));
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
        // With a scheme for TLS the client library would read the system's certificates here.
        let mut config = Config::from_url_centralized(&format!("redis://{rest}"))
            .map_err(|problem| refused(problem.details()))?;
        // RESP3 distinguishes push messages from replies, and maps from lists
        // (https://github.com/redis/redis-specifications).
        config.version = RespVersion::RESP3;
        // Each connection begins with database 0, and selecting it needs a right.
        config.database = config.database.filter(|database| *database != 0);
        if config
            .username
            .as_deref()
            .is_some_and(|user| !user.is_empty())
        {
            // The client library sends the user's name only with a password. A user without one
            // has the empty password.
            config.password.get_or_insert_default();
        }
        config.username = config.username.as_deref().map(inline);
        config.password = config.password.as_deref().map(inline);
        Ok(Self {
            config,
            connection_name: connection_name.into(),
            connect_timeout,
            limit,
            is_secure,
            sentinels: None,
        })
    }

    /// Parses `/master[/database]`, and each host by `parse`, as the URL of a server.
    fn parse_sentinels(
        login: &str,
        hosts: &str,
        path: &str,
        parse: &dyn Fn(&str) -> Result<Self, Error>,
    ) -> Result<Self, Error> {
        if path.contains(['?', '#']) {
            return Err(refused("something follows the database number"));
        }
        let path = path.strip_prefix('/').unwrap_or_default();
        let mut parts = path.splitn(2, '/');
        let master = parts.next().unwrap_or_default();
        if master.is_empty() || !is_percent_encoded(master) {
            return Err(refused("the name of a master has to follow the sentinels"));
        }
        let master = percent_encoding::percent_decode_str(master)
            .decode_utf8()
            .map_err(|_| refused("the name of the master is not UTF-8"))?;
        let database = parts.next().unwrap_or_default();
        let mut nodes = Vec::new();
        for host in hosts.split(',') {
            let mut node = parse(host)?;
            let has_port =
                Url::parse(&format!("redis://{host}")).is_ok_and(|url| url.port().is_some());
            if let (ServerConfig::Centralized { server }, false) =
                (&mut node.config.server, has_port)
            {
                server.port = 26_379;
            }
            nodes.push(node);
        }
        let first = hosts.split(',').next().unwrap_or_default();
        let at = if login.is_empty() { "" } else { "@" };
        let mut settings = parse(&format!("{login}{at}{first}/{database}"))?;
        settings.sentinels = Some(Sentinels::new(master.into_owned(), nodes));
        Ok(settings)
    }

    /// The same settings with a login at the sentinels.
    pub(crate) fn with_sentinel_login(mut self, login: Option<&Login>) -> Result<Self, Error> {
        let Some(Login { user, password }) = login else {
            return Ok(self);
        };
        let Some(sentinels) = &mut self.sentinels else {
            return Err(Error::InvalidConfig {
                setting: "sentinel login",
                problem: "the URL has no sentinels".to_owned(),
                allowed: "a URL that begins with redis+sentinel://",
            });
        };
        for node in sentinels.nodes_mut() {
            node.config.username = Some(inline(user));
            node.config.password = Some(inline(password));
        }
        Ok(self)
    }

    /// The same settings for one server: the sentinels are asked which.
    pub(super) async fn resolved(&self) -> Result<Cow<'_, Self>, Error> {
        let Some(sentinels) = &self.sentinels else {
            return Ok(Cow::Borrowed(self));
        };
        let named = sentinels.server(self.connect_timeout).await?;
        let mut resolved = Self {
            sentinels: None,
            ..self.clone()
        };
        if let ServerConfig::Centralized { server } = &mut resolved.config.server {
            // The name for TLS stays.
            (server.host, server.port) = (named.host, named.port);
        }
        Ok(Cow::Owned(resolved))
    }

    pub(super) fn sentinels(&self) -> Option<&Sentinels> {
        self.sentinels.as_ref()
    }

    /// The server to connect to, unless sentinels are asked.
    pub(super) fn server(&self) -> Option<Server> {
        self.config.server.hosts().into_iter().next()
    }

    /// The same settings with TLS if the URL asks for it. Reads the system's certificates.
    #[cfg(feature = "tls")]
    pub(crate) fn secured(mut self, tls: Option<crate::tls::Tls>) -> Result<Self, Error> {
        if !self.is_secure {
            return match tls {
                None => Ok(self),
                Some(_) => Err(Error::InvalidConfig {
                    setting: "tls",
                    problem: "the URL does not ask for TLS".to_owned(),
                    allowed: "a URL that begins with rediss:// or valkeys://",
                }),
            };
        }
        let tls = tls.unwrap_or_default();
        let connector = super::tls::connector(&tls)?;
        if let Some(name) = &tls.server_name {
            super::tls::check_name(name)?;
        }
        let nodes = self.sentinels.iter_mut().flat_map(Sentinels::nodes_mut);
        for config in nodes.map(|node| &mut node.config).chain([&mut self.config]) {
            if let (Some(name), ServerConfig::Centralized { server }) =
                (tls.server_name.as_deref(), &mut config.server)
            {
                server.tls_server_name = Some(name.into());
            }
            config.tls = Some(connector.clone().into());
        }
        Ok(self)
    }

    /// Resolves if the server answers in plain text where TLS is expected.
    pub(super) async fn answers_in_plain_text(&self) {
        #[cfg(feature = "tls")]
        if self.is_secure {
            let patience = (self.connect_timeout / 4).min(Duration::from_secs(1));
            for server in self.config.server.hosts() {
                if super::tls::answers_in_plain_text(&server.host, server.port, patience).await {
                    return;
                }
            }
        }
        std::future::pending().await
    }

    /// The name that `CLIENT LIST` shows for the connections.
    pub(super) fn connection_name(&self) -> &str {
        &self.connection_name
    }

    /// The error for a connect timeout.
    pub(crate) fn connect_timed_out(&self) -> Error {
        Error::Timeout {
            step: Step::Connect,
            after: self.connect_timeout,
            lock: None,
            address: Some(self.address()),
        }
    }

    /// How long a reply may take now.
    pub(super) fn command_timeout(&self) -> Duration {
        self.limit.now()
    }

    pub(super) fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Host and port, for errors and logs.
    pub(crate) fn address(&self) -> String {
        if let Some(sentinels) = &self.sentinels {
            return sentinels.address();
        }
        let hosts = self.config.server.hosts();
        hosts
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// The number of the database, if it is not 0.
    pub(super) fn database(&self) -> Option<u8> {
        self.config.database
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// The same settings with a connect timeout of at most `limit`.
    pub(super) fn within(&self, limit: Duration) -> Self {
        Self {
            connect_timeout: self.connect_timeout.min(limit),
            ..self.clone()
        }
    }

    /// A client with these settings, not connected yet. It connects once: calls of an old
    /// connection have to be fenced before the first call on a new one.
    pub(super) fn client(&self) -> fred::clients::Client {
        let config = Config {
            fail_fast: true,
            ..self.config.clone()
        };
        let connection = ConnectionConfig {
            connection_timeout: self.connect_timeout,
            // The handshake is a part of connecting, so it has the same timeout.
            internal_command_timeout: self.connect_timeout,
            // The client library must not repeat a script whose reply is lost.
            max_command_attempts: 1,
            max_redirections: 0,
            tcp: fred::types::config::TcpConfig {
                nodelay: Some(true),
                ..Default::default()
            },
            ..Default::default()
        };
        let performance = self.performance();
        fred::clients::Client::new(config, Some(performance), Some(connection), None)
    }

    /// The settings that a client can change while it is connected.
    pub(super) fn performance(&self) -> PerformanceConfig {
        PerformanceConfig {
            default_command_timeout: self.command_timeout(),
            // Messages that exceed the capacity are dropped; then every waiter is woken. The memory
            // is allocated at the start.
            broadcast_channel_capacity: 256,
            ..Default::default()
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("address", &self.address())
            .field("is_secure", &self.is_secure)
            .field("database", &self.config.database)
            .field("connect_timeout", &self.connect_timeout)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// A user and a password. `Debug` shows no secret.
#[derive(Clone)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

/// Quotes a user's name or password for an inline command.
///
/// The client library sends `HELLO` as an inline command and does not quote: a space would end the
/// argument, and a line feed the command, so the server would run the rest as another command.
/// Inside double quotes the server reads `\xHH` as any byte
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

/// Whether a URL with an `@` behind its authority has no login, and begins with a host, a port and
/// a database number. A password that begins with digits looks like a port and a number, too
/// (`redis://app:12#34@host:6379`): then a host follows the `@`.
fn is_host_and_database(authority: &str, rest: &str) -> bool {
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let (host, port) = authority.rsplit_once(':').unwrap_or((authority, ""));
    let is_port = port.is_empty() || is_number(port) && port.parse::<u16>().is_ok();
    let mut parts = rest[authority.len()..].splitn(2, ['?', '#']);
    let path = parts.next().unwrap_or_default();
    let last = rest.rsplit_once('@').map_or("", |(_, last)| last);
    let is_a_host = last.contains(['.', ':']) || last.split('/').next() == Some("localhost");
    // `?mail=a@b.c` is a parameter.
    let is_parameter = parts.next().is_some_and(|query| {
        let (key, _) = query.split_once('=').unwrap_or_default();
        !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric())
    });
    !host.is_empty() && is_port && is_number(path.trim_matches('/')) && (is_parameter || !is_a_host)
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
        allowed: if cfg!(feature = "tls") {
            "redis://[user[:password]@]host[:port][/database], or valkey://, rediss://, valkeys://; redis+sentinel:// etc."
        } else {
            "redis://[user[:password]@]host[:port][/database], or valkey://; redis+sentinel:// etc."
        },
    }
}

#[cfg(test)]
mod properties {
    use proptest::prelude::*;

    use super::*;

    /// Splits an inline command like the server (`sdssplitargs` in its `sds.c`).
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
            Limit::new(Duration::from_secs(1), Duration::from_secs(1)).into(),
        )
    }

    #[test]
    fn split_handles_quotes_like_server() {
        let split = |line: &str| split(line.as_bytes()).map(|words| words.len());
        assert_eq!(split(r#"HELLO 3 "a b" 'c d' e"f g""#), Some(5));
        assert_eq!(split(r#"AUTH "\x20\"\\""#), Some(2));
        assert_eq!(split(r#"AUTH "a"b"#), None);
        assert_eq!(split(r#"AUTH "a"#), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1_000, ..Default::default() })]

        #[test]
        fn server_reads_any_inlined_secret_unchanged(secret in odd_text(20)) {
            let line = format!("HELLO 3 AUTH default {} SETNAME x", inline(&secret));
            prop_assert!(line.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{line:?}");
            let words = split(line.as_bytes()).expect("balanced quotes");
            prop_assert_eq!(words.len(), 7);
            prop_assert_eq!(words[4].as_slice(), secret.as_bytes());
        }

        #[test]
        fn any_login_is_kept_and_never_shown(user in odd_text(8), more in odd_text(8), database in 0..300_u16) {
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
        fn any_url_is_parsed_or_refused_with_typed_error(scheme in "(redis(s|-cluster|-sentinel)?|valkeys?|[a-z+]{0,4})", text in odd_text(30)) {
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
