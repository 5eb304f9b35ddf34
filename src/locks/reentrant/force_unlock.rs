//! Freeing a lock, whoever holds it.

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

/// Looks who holds the lock, and frees that owner's possession.
pub(super) async fn force_unlock(core: &Arc<Core>, keys: &Keys) -> Result<bool, Error> {
    const LOOKS: usize = 5;
    for _ in 0..LOOKS {
        // What was granted before the look, and is not there, is lost already.
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
    Ok(force_out(core, keys, Bytes::new()).await?.0)
}

/// Frees the possession of an owner of this client, in its turn: a grant that is on its way has
/// arrived then, and it does nothing more with the lock until it is known what became of this. Its
/// next possession would look the same to a script that runs twice.
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

/// Frees the lock if that owner still holds it. Tells whether it has been freed.
async fn free(
    core: &Arc<Core>,
    keys: &Keys,
    owner: Bytes,
    earlier: &[Arc<Lease>],
) -> Result<bool, Error> {
    // Told before anybody else can have it.
    lose_all(core, keys, |lease| {
        lease.ident.field == owner
            || earlier
                .iter()
                .any(|earlier| std::ptr::eq(&**earlier, lease))
    });
    let (freed, repeated) = force_out(core, keys, owner).await?;
    // What a repeat does not find any more, the first sending has freed; or its owner has gone.
    Ok(freed || repeated)
}

/// Tells owners in this client that their lock is force-unlocked.
fn lose_all(core: &Arc<Core>, keys: &Keys, whose: impl Fn(&Lease) -> bool) {
    for lease in core
        .holds
        .leases_of(&keys.name)
        .into_iter()
        .filter(|lease| whose(lease))
    {
        let reason = lease.lose(LostReason::ForceUnlocked);
        crate::renewal::tell_lost(core, &lease, reason, false);
    }
}

/// Frees the lock if that owner holds it. Tells whether it did, and whether an earlier sending may
/// have.
async fn force_out(core: &Core, keys: &Keys, owner: Bytes) -> Result<(bool, bool), Error> {
    let lock = keys.display();
    // What names no owner must not run twice.
    let once = owner.is_empty();
    let row = [("owner", owner), ("channel", keys.channel.clone())];
    let call = FORCE_UNLOCK.batch(1).row(keys.name.clone(), row).call();
    let Asked { reply, repeated } = if once {
        let reply = core.link.call(call).await;
        Asked {
            reply: reply.map_err(|failure| one_try(core, failure, &lock))?,
            repeated: false,
        }
    } else {
        core.ask(call, &lock, Step::ForceUnlock).await?
    };
    let answer = answer(reply)
        .and_then(accepted)
        .map_err(|failure| one_try(core, failure, &lock))?;
    Ok((answer.code == 1, repeated))
}

/// The error for a force unlock that is not tried again.
fn one_try(core: &Core, failure: Failure, lock: &str) -> Error {
    let unknown = matches!(failure, Failure::Unknown(_)).then_some(Step::ForceUnlock);
    crate::locks::error(failure, lock, &core.address, unknown)
}
