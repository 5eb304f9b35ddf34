//! What a new connection is asked before it carries calls, in one round trip.

use fred::interfaces::ClientLike;
use fred::types::config::Options;
use fred::types::{ClusterHash, CustomCommand, Value};

use super::Settings;
use super::connection::Connection;
use super::frames::read;
use crate::error::Error;
use crate::wire::{Failure, Reply};

/// The id and the address of a connection on the server. A restarted server counts its ids from the
/// beginning again, so an id identifies a connection only together with the address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) id: String,
    pub(super) address: String,
}

/// Why a new connection carries no calls.
pub(super) enum Unusable {
    /// The server is starting, or busy with a script: it may answer later.
    Busy,
    /// There was no reply, or one that belonged to another call.
    Lost,
    /// The sentinels named it, and it is no master, or not yet.
    NotMaster,
    /// A cluster, a sentinel, or a server that is too old.
    Unsupported(Error),
}

/// Names the connection, asks for its identity, and makes sure that the server is supported. No
/// identity if the server does not state it (ACL).
///
/// This is a part of connecting, so the connect timeout applies.
pub(super) async fn set_up(
    connection: &Connection,
    settings: &Settings,
) -> Result<Option<Identity>, Unusable> {
    let (identity, server, ()) = futures::join!(
        ask(connection, settings, "CLIENT", "INFO"),
        ask(connection, settings, "INFO", "server"),
        connection.set_name(settings.connection_name()),
    );
    if let Some(server) = server? {
        ensure_supported(&server, settings)?;
    }
    if settings.sentinels().is_some() {
        let replication = ask(connection, settings, "INFO", "replication").await?;
        if replication.is_some_and(|info| !info.contains("role:master")) {
            return Err(Unusable::NotMaster);
        }
    }
    let Some(info) = identity? else {
        return Ok(None);
    };
    let field = |name: &str| {
        let found = info.split_whitespace().find_map(|it| it.strip_prefix(name));
        found.map(str::to_owned)
    };
    match (field("id="), field("addr=")) {
        (Some(id), Some(address)) => Ok(Some(Identity { id, address })),
        (Some(_), None) => Ok(None),
        (None, _) => Err(Unusable::Lost),
    }
}

/// The text that the server answers. `None` if the user may not ask.
async fn ask(
    connection: &Connection,
    settings: &Settings,
    command: &'static str,
    argument: &'static str,
) -> Result<Option<String>, Unusable> {
    let command = CustomCommand::new_static(command, ClusterHash::Random, false);
    let options = Options {
        timeout: Some(settings.connect_timeout()),
        ..Default::default()
    };
    let client = connection.client().with_options(&options);
    let call = client.custom_raw(command, vec![Value::from_static_str(argument)]);
    let outcome = tokio::select! {
        biased;
        outcome = call => outcome,
        () = connection.ended() => return Err(Unusable::Lost),
    };
    match outcome.map(read) {
        Ok(Ok(Reply::Text(text))) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
        Ok(Err(failure @ Failure::Server(_))) if failure.is_transient() => Err(Unusable::Busy),
        Ok(Err(Failure::Server(_))) => Ok(None),
        Ok(_) | Err(_) => Err(Unusable::Lost),
    }
}

/// Refuses a cluster, a sentinel, and a server that is too old, by its reply to `INFO server`.
fn ensure_supported(info: &str, settings: &Settings) -> Result<(), Unusable> {
    let unsupported = |problem| {
        Err(Unusable::Unsupported(Error::UnsupportedServer {
            address: settings.address(),
            problem,
        }))
    };
    let field = |name: &str| {
        let mut fields = info.lines().filter_map(|line| line.trim().split_once(':'));
        fields.find_map(|(field, value)| (field == name).then_some(value))
    };
    // Valkey has another field for the mode. Its `redis_version` is the version of Redis with which
    // it is compatible.
    match field("redis_mode").or_else(|| field("server_mode")) {
        Some("standalone") => {}
        Some("cluster") => return unsupported("it is a part of a cluster".into()),
        Some("sentinel") => {
            return unsupported("it is a sentinel: its URL begins with redis+sentinel://".into());
        }
        Some(mode) => return unsupported(format!("it runs in mode {mode}")),
        // A reply to another call.
        None if !info.starts_with("# Server") => return Err(Unusable::Lost),
        None => {}
    }
    match field("redis_version") {
        Some(version) if is_too_old(version) => unsupported(format!(
            "its version is {version}, and 6.2 or later is required"
        )),
        _ => Ok(()),
    }
}

/// Whether the version is below 6.2. A version that cannot be parsed is accepted.
fn is_too_old(version: &str) -> bool {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) < (6, 2),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::is_too_old;

    #[test]
    fn version_below_6_2_is_too_old() {
        for version in ["2.8.24", "5.0.14", "6.0.16", "6.1.240"] {
            assert!(is_too_old(version), "{version}");
        }
        for version in ["6.2.0", "7.0.15", "8.0.0", "255.255.255", "", "unstable"] {
            assert!(!is_too_old(version), "{version}");
        }
    }
}
