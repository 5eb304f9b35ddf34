//! Force unlock: frees a lock that any owner holds.
//!
//! The call names the owner that an inspection found, so that a call that runs twice does not free
//! the tenure of the next owner.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::timeout;

use super::inspect::Inspected;
use super::scripts::accepted;
use crate::core::{Asked, Core};
use crate::error::{Error, LostReason, Step};
use crate::handoff::Handoff;
use crate::holds::EntryRef;
use crate::keys::Keys;
use crate::lease::Lease;
use crate::link::Failure;
use crate::owner::thread_of;
use crate::script::answer;
use crate::script::catalog::FORCE_UNLOCK;

/// Reads which owner holds the lock, and frees that owner's tenure. Returns whether the lock was
/// held.
pub(super) async fn force_unlock(core: &Arc<Core>, keys: &Keys) -> Result<bool, Error> {
    const INSPECTIONS: usize = 5;
    for _ in 0..INSPECTIONS {
        // A tenure that began before the inspection and that the server does not have is lost.
        let earlier = core.holds.leases_of(&keys.name);
        let Some(owner) = Inspected::of(core, keys).await?.first_owner(keys)? else {
            lose_all(core, keys, |lease| {
                earlier
                    .iter()
                    .any(|earlier| std::ptr::eq(&**earlier, lease))
            });
            return Ok(false);
        };
        let thread = thread_of(&owner, core.client_id);
        let own = thread.and_then(|thread| core.holds.entry_in_use(&keys.name, thread));
        let freed = match own {
            Some(entry) => free_own(core, keys, owner, earlier, entry).await?,
            None => free(core, keys, owner, &earlier).await?,
        };
        if freed {
            return Ok(true);
        }
    }
    lose_all(core, keys, |_| true);
    Ok(send(core, keys, Bytes::new()).await?.0)
}

/// Frees the tenure of an owner of this client, serialized with the owner's other operations on the
/// lock: a pending acquire has ended by then, and the next one starts after this call has an
/// outcome. Otherwise a script that runs twice could free the owner's next tenure.
async fn free_own(
    core: &Arc<Core>,
    keys: &Keys,
    owner: Bytes,
    earlier: Vec<Arc<Lease>>,
    entry: EntryRef,
) -> Result<bool, Error> {
    let turns = Arc::clone(&entry.turns);
    let (worker, keys) = (Arc::clone(core), keys.clone());
    let limit = core.config.patience();
    let freeing = async move {
        let Ok(_turn) = timeout(limit, entry.turns.take()).await else {
            return Err(entry.ident.timeout(Step::EarlierOperation, limit));
        };
        free(&worker, &keys, owner, &earlier).await
    };
    Handoff::new(&core.background, &turns, freeing)
        .await
        .unwrap_or(Err(Error::Closed))
}

/// Frees the lock if that owner still holds it. Returns whether it was freed.
async fn free(
    core: &Arc<Core>,
    keys: &Keys,
    owner: Bytes,
    earlier: &[Arc<Lease>],
) -> Result<bool, Error> {
    // Owners of this client are notified before another owner can acquire the lock.
    lose_all(core, keys, |lease| {
        lease.ident.field == owner
            || earlier
                .iter()
                .any(|earlier| std::ptr::eq(&**earlier, lease))
    });
    let (freed, repeated) = send(core, keys, owner).await?;
    // If a repeated call does not find the owner, the first copy freed the lock, or the owner
    // released it.
    Ok(freed || repeated)
}

/// Notifies the selected owners of this client that their lock is force-unlocked.
fn lose_all(core: &Arc<Core>, keys: &Keys, is_selected: impl Fn(&Lease) -> bool) {
    for lease in core
        .holds
        .leases_of(&keys.name)
        .into_iter()
        .filter(|lease| is_selected(lease))
    {
        let reason = lease.lose(LostReason::ForceUnlocked);
        crate::renewal::tell_lost(core, &lease, reason, false);
    }
}

/// Sends the call that frees the lock if that owner holds it; an empty owner stands for any.
/// Returns whether the call freed the lock, and whether an earlier copy of it may have done so.
async fn send(core: &Core, keys: &Keys, owner: Bytes) -> Result<(bool, bool), Error> {
    let lock = keys.display();
    // A call that names no owner must not run twice.
    let once = owner.is_empty();
    let row = [("owner", owner), ("channel", keys.channel.clone())];
    let call = FORCE_UNLOCK.batch(1).row(keys.name.clone(), row).call();
    let Asked { reply, repeated } = if once {
        let reply = core.link.call(call).await;
        Asked {
            reply: reply.map_err(|failure| final_error(core, failure, &lock))?,
            repeated: false,
        }
    } else {
        core.ask(call, &lock, Step::ForceUnlock).await?
    };
    let answer = answer(reply)
        .and_then(accepted)
        .map_err(|failure| final_error(core, failure, &lock))?;
    Ok((answer.code == 1, repeated))
}

/// The error for a force unlock that is not repeated.
fn final_error(core: &Core, failure: Failure, lock: &str) -> Error {
    let unknown = matches!(failure, Failure::Unknown(_)).then_some(Step::ForceUnlock);
    crate::locks::error(failure, lock, &core.address, unknown)
}
