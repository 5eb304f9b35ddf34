//! Watches the connection for calls, and replaces it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fred::interfaces::ClientLike;
use fred::types::config::Options;
use fred::types::{ClusterHash, CustomCommand, Value};
use tokio::time::Instant;

use super::client::{LOST, Numbered, Shared, say};
use super::frames::read;
use super::line::Line;
use super::settings::Reconnect;
use super::{Failure, Reply, Settings};
use crate::stats::add;

/// Watches the connection: its end, calls that distrust it, and its silence while nobody calls.
/// Replaces it.
pub(super) async fn keep(shared: Arc<Shared>) {
    let period = shared
        .settings
        .command_timeout()
        .max(Duration::from_millis(100));
    // The connections whose late calls are not ruled out yet.
    let mut unfenced = Vec::new();
    loop {
        let Some(line) = shared.line.read().clone() else {
            return;
        };
        tokio::select! {
            () = shared.mend.notified() => {}
            () = line.line.ended() => {}
            // What is wrong with the connection is found out by sending; a refusal is an answer,
            // too. Dropped as soon as somebody else finds it out.
            () = async {
                tokio::time::sleep(period).await;
                let ping = CustomCommand::new_static("PING", ClusterHash::Random, false);
                let _ = shared.send(&line, ping, Vec::new()).await;
            } => {}
        }
        if !line.line.has_ended() && shared.distrusted.load(Ordering::Acquire) < line.number {
            continue;
        }
        let number = line.number + 1;
        // From now on calls are not sent; those under way end with the line.
        let old = shared.line.write().take();
        unfenced.extend(line.identity.clone());
        line.line.end();
        drop((old, line));
        let lost = Instant::now();
        let (line, identity) = replacement(&shared.settings, &mut unfenced).await;
        add(&shared.counters.reconnects);
        tracing::info!(
            address = %shared.settings.address(),
            outage = ?lost.elapsed(),
            "the server is connected again",
        );
        *shared.line.write() = Some(Arc::new(Numbered {
            number,
            line,
            identity,
        }));
        shared.ready.notify_waiters();
    }
}

/// Opens a new connection, and rules out the old ones. Tries for as long as it takes.
async fn replacement(
    settings: &Settings,
    unfenced: &mut Vec<Identity>,
) -> (Line, Option<Identity>) {
    let mut pause = Duration::from_millis(5);
    let mut told = false;
    // A try may stand still, while the next would not; but each may need longer than the one before
    // had.
    let mut limit = settings.command_timeout();
    loop {
        let hurried = settings.within(limit);
        limit = limit.saturating_mul(2).min(settings.connect_timeout());
        match Line::open(&hurried, Reconnect::Never).await {
            Ok(line) => {
                let (identified, ()) = futures::join!(
                    willing(&line, &hurried),
                    line.set_name(settings.connection_name()),
                );
                // One that fails here was asked nothing, so nothing of it has to be ruled out.
                if let Ok(identity) = identified {
                    if fence(&line, unfenced).await {
                        return (line, identity);
                    }
                }
            }
            Err(error) if !told => {
                told = true;
                tracing::warn!(%error, "the server cannot be reached, connecting is tried again");
            }
            Err(_) => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(crate::retry::LONGEST);
    }
}

/// Has the server close old connections, so that nothing that was sent on them is run from now on.
/// `false` if that is not known and has to be tried again.
async fn fence(line: &Line, unfenced: &mut Vec<Identity>) -> bool {
    while let Some(old) = unfenced.last() {
        let kill = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
        let args = ["KILL", "ID", &old.id, "ADDR", &old.address]
            .map(Value::from)
            .to_vec();
        match say(line, kill, args).await {
            Ok(_) => {}
            Err(failure) if failure.is_transient() => return false,
            Err(failure) => {
                tracing::debug!(error = %failure, "a replaced connection could not be closed on the server");
            }
        }
        unfenced.pop();
    }
    true
}

/// As [`identify`], of a server that may be busy, for as long as it is.
async fn willing(line: &Line, settings: &Settings) -> Result<Option<Identity>, Failure> {
    loop {
        match identify(line, settings).await {
            Err(Failure::Server(_)) => tokio::time::sleep(crate::retry::LONGEST).await,
            outcome => return outcome,
        }
    }
}

/// Asks the server how it names a connection; `None` if it will not say (ACL, Redis before 6.2).
/// That it says nothing yet (a script runs) is an error of the server's.
///
/// A part of connecting, so it has as long as that.
pub(super) async fn identify(
    line: &Line,
    settings: &Settings,
) -> Result<Option<Identity>, Failure> {
    let info = CustomCommand::new_static("CLIENT", ClusterHash::Random, false);
    let options = Options {
        timeout: Some(settings.connect_timeout()),
        ..Default::default()
    };
    let patient = line.client().with_options(&options);
    let call = patient.custom_raw(info, vec![Value::from_static_str("INFO")]);
    let outcome = tokio::select! {
        biased;
        outcome = call => outcome,
        () = line.ended() => return Err(Failure::Unknown(LOST.into())),
    };
    match outcome.map(read) {
        Ok(Ok(Reply::Text(info))) => {
            let info = String::from_utf8_lossy(&info);
            let field = |name: &str| {
                info.split_whitespace()
                    .find_map(|field| field.strip_prefix(name))
            };
            Ok(field("id=")
                .zip(field("addr="))
                .map(|(id, address)| Identity {
                    id: id.into(),
                    address: address.into(),
                }))
        }
        Ok(Err(failure @ Failure::Server(_))) if failure.is_transient() => Err(failure),
        Ok(Err(Failure::Server(_))) => Ok(None),
        Ok(Ok(_) | Err(_)) => Err(Failure::Unknown("the answer to CLIENT INFO is none".into())),
        Err(problem) => Err(Failure::Unknown(problem.to_string())),
    }
}

/// A connection, as the server names it. Numbers begin anew when a server restarts, so the address
/// goes along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    id: String,
    address: String,
}
