//! Writes what the engine has to say into the log.

use crate::engine::Notice;

pub(super) fn log(notice: Notice) {
    match notice {
        Notice::Lost(subject, reason) => tracing::warn!(
            lock = %subject.lock,
            owner = %subject.owner,
            %reason,
            "a lock was lost",
        ),
        Notice::Deadlock { subject, held_by } => tracing::warn!(
            lock = %subject.lock,
            owner = %subject.owner,
            %held_by,
            "a task waits for a lock that it holds itself under another owner",
        ),
        Notice::LongWait {
            subject,
            held_by,
            waited,
        } => tracing::warn!(
            lock = %subject.lock,
            owner = %subject.owner,
            %held_by,
            ?waited,
            "a request waits long for a lock that another owner of the same client holds",
        ),
        Notice::Unclaimed(subject) => tracing::warn!(
            lock = %subject.lock,
            owner = %subject.owner,
            "a request was not polled when it was granted, the grant was released and the request is repeated",
        ),
        Notice::ReleaseFailed(lock, error) => tracing::warn!(
            %lock,
            %error,
            "a hold could not be released, its lease will expire",
        ),
        Notice::NotSettled(lock, failure) => tracing::warn!(
            %lock,
            error = %failure,
            "an unknown outcome could not be settled, the lease will expire",
        ),
        Notice::ReleaseNotSent(subject, reason) => tracing::warn!(
            lock = %subject.lock,
            owner = %subject.owner,
            %reason,
            "a pending release was given up, the lease will expire",
        ),
        Notice::RenewalRefused(subject, error) => tracing::warn!(
            lock = %subject.lock,
            owner = %subject.owner,
            %error,
            "the server refused a renewal, it will be tried again",
        ),
        Notice::RenewalOutage(failure) => tracing::warn!(
            error = %failure,
            "renewals get no reply, they are tried again until the leases expire",
        ),
        Notice::RenewalOutageOver => tracing::info!("renewals get replies again"),
        Notice::SubscriptionRefused(channel) => tracing::warn!(
            channel = %String::from_utf8_lossy(&channel),
            "the server refused a subscription, its waiters rely on re-checks",
        ),
    }
}
