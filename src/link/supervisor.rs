//! The supervisor: watches the connection for calls, and replaces it after a failure.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fred::types::{ClusterHash, CustomCommand, Value};

use super::Settings;
use super::client::{Current, Shared, send_on};
use super::connection::Connection;
use super::setup::{Identity, Unusable, set_up};
use crate::error::{Error, ServerErrorKind};
use crate::wire::Failure;

/// The longest pause between two tries.
const LONGEST: Duration = Duration::from_millis(250);

/// Replaces the connection when it has ended or is not trusted any more. Checks it with a PING
/// while no other call does.
pub(super) async fn supervise(shared: Arc<Shared>) {
    let period = shared
        .settings
        .command_timeout()
        .max(Duration::from_millis(100));
    // Old connections that are not fenced yet.
    let mut unfenced = Vec::new();
    loop {
        let Some(current) = shared.current.read().clone() else {
            return;
        };
        watch(&shared, &current, period).await;
        let number = current.number + 1;
        // From now on no call is sent; pending calls fail with the connection.
        let old = shared.current.write().take();
        match &current.identity {
            Some(identity) => unfenced.push(identity.clone()),
            None if current.is_provisional => {}
            None => shared.report_unfenced("the server does not state its id"),
        }
        current.connection.end();
        let current_is_provisional = current.is_provisional;
        drop((old, current));
        // Counted from the last reply: when the connection was lost is not known.
        let replied = *shared.replied.lock();
        let (connection, identity) = open_replacement(&shared, &mut unfenced).await;
        *shared.unreachable.lock() = None;
        if !current_is_provisional {
            shared.reconnects.fetch_add(1, Ordering::Relaxed);
        }
        tracing::info!(
            address = %shared.settings.address(),
            outage = ?replied.elapsed(),
            "the server is connected again",
        );
        *shared.current.write() = Some(Arc::new(Current {
            number,
            connection,
            identity,
            opened: tokio::time::Instant::now(),
            is_provisional: false,
        }));
        shared.ready.notify_waiters();
    }
}

/// Returns when a connection has ended or is not trusted any more.
async fn watch(shared: &Shared, current: &Current, period: Duration) {
    let named_another = async {
        match (shared.settings.sentinels(), current.connection.server()) {
            (Some(sentinels), Some(server)) => sentinels.named_another(server).await,
            _ => std::future::pending().await,
        }
    };
    let mut named_another = std::pin::pin!(named_another);
    let is_usable = || {
        let is_trusted = shared.distrusted.load(Ordering::Acquire) < current.number;
        is_trusted && !current.connection.has_ended()
    };
    while is_usable() {
        tokio::select! {
            () = shared.distrust_signal.notified() => {}
            () = current.connection.ended() => {}
            () = &mut named_another => {
                shared.distrust(current.number, "the sentinels name another server");
                shared.moved.notify_one();
                return;
            }
            // Sending a command shows whether the connection works; a server error is a reply, too.
            // The other branches drop this one when they report a failure first.
            () = async {
                tokio::time::sleep(period).await;
                let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
                let _ = shared.send(current, ping, Vec::new()).await;
                let name = shared.settings.connection_name();
                current.connection.set_name(name).await;
            } => {}
        }
    }
}

/// Opens a new connection, and fences the old ones. Tries until both succeed.
async fn open_replacement(
    shared: &Shared,
    unfenced: &mut Vec<Identity>,
) -> (Connection, Option<Identity>) {
    let settings = &shared.settings;
    let mut pause = Duration::from_millis(5);
    let mut reported = false;
    // A try may hang where the next one succeeds, so the first limit is short. A slow server needs
    // longer, so the limit doubles.
    // Where replies are late, so are those while connecting, which takes several round trips.
    let mut limit = if settings.limit().has_grown() {
        settings.connect_timeout()
    } else {
        settings.command_timeout()
    };
    loop {
        let limited = settings.within(limit);
        limit = limit.saturating_mul(2).min(settings.connect_timeout());
        let error = match try_to_open(shared, &limited, unfenced).await {
            Ok(opened) => return opened,
            Err(error) => error,
        };
        if let Some(error) = error {
            if !std::mem::replace(&mut reported, true) {
                tracing::warn!(%error, "the server cannot be reached, connecting is tried again");
            }
            *shared.unreachable.lock() = Some(error.into());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST);
    }
}

/// One try, until the sentinels name another server. The error is `None` if it is no news.
async fn try_to_open(
    shared: &Shared,
    settings: &Settings,
    unfenced: &mut Vec<Identity>,
) -> Result<(Connection, Option<Identity>), Option<Error>> {
    let resolved = settings.resolved().await?;
    let opening = async {
        let connection = Connection::open(&resolved).await?;
        match set_up_when_idle(&connection, settings).await {
            Ok(identity) if fence(shared, &connection, unfenced).await => {
                Ok((connection, identity))
            }
            // A connection that fails here has carried no calls, so it needs no fencing.
            Ok(_) | Err(Unusable::Lost | Unusable::Busy | Unusable::NotMaster) => Err(None),
            Err(Unusable::Unsupported(error)) => Err(Some(error)),
        }
    };
    // A server that hangs is replaced by one that works.
    let named_another = async {
        match (settings.sentinels(), resolved.server()) {
            (Some(sentinels), Some(server)) => {
                tokio::time::sleep(LONGEST).await;
                sentinels.named_another(&server).await;
            }
            _ => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        opened = opening => opened,
        () = named_another => Err(None),
    }
}

/// As [`set_up`], repeated while the server is busy.
async fn set_up_when_idle(
    connection: &Connection,
    settings: &Settings,
) -> Result<Option<Identity>, Unusable> {
    loop {
        match set_up(connection, settings).await {
            Err(Unusable::Busy) => tokio::time::sleep(LONGEST).await,
            outcome => return outcome,
        }
    }
}

/// Has the server close the old connections, so that no call that was sent on them runs later.
/// Returns `false` if the outcome is unknown; then the caller tries again.
async fn fence(shared: &Shared, connection: &Connection, unfenced: &mut Vec<Identity>) -> bool {
    while let Some(old) = unfenced.last() {
        let kill = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
        let args = ["KILL", "ID", &old.id, "ADDR", &old.address]
            .map(Value::from)
            .to_vec();
        match send_on(connection, kill, args).await {
            Ok(_) => {}
            Err(failure) if failure.is_transient() => return false,
            Err(Failure::Server(error)) if error.kind() == ServerErrorKind::NoPermission => {
                shared.report_unfenced(error.message());
            }
            // It has ended already.
            Err(_) => {}
        }
        unfenced.pop();
    }
    true
}
