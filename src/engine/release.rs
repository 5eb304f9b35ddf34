//! Releases, and the settlement of unknown outcomes.

use std::time::Duration;

use super::backoff::Backoff;
use super::entry::{Action, Op};
use super::errors;
use super::notice::Notice;
use super::requests::{Outcome, Request};
use super::tenure::{Hold, HoldState, Mode};
use super::timers::Timer;
use super::{Engine, EntryId, HoldId, OpId, RequestId, TenureId};
use crate::config::LeaseTime;
use crate::error::{Error, LostReason, ServerErrorKind, Step};
use crate::keys::Keys;
use crate::kind::{Kind, Released};
use crate::owner::Owner;
use crate::time::Time;
use crate::wire::{Failure, Reply};

#[derive(Debug)]
pub(super) struct Release {
    hold: HoldId,
    tenure: TenureId,
    /// Whether a guard stood for the hold.
    was_guarded: bool,
    /// The hold, from the start of the operation.
    taken: Option<Hold>,
    /// The count to leave on the server.
    leave: i64,
    /// What the remaining holds are entitled to; `None` leaves the expiry as it is.
    stay: Option<LeaseTime>,
    is_last: bool,
}

#[derive(Debug)]
pub(super) struct Settle {
    leave: i64,
}

impl Engine {
    /// Releases a hold for a caller who waits for the server's confirmation.
    /// `is_reported` says whether the caller gets to see an unknown outcome.
    pub(crate) fn release(&mut self, now: Time, hold: HoldId, is_reported: bool) -> RequestId {
        let Some(record) = self.holds.get(hold) else {
            let id = self.requests.insert(Request::Close);
            self.complete(id, Outcome::Failed(self.closed()));
            return id;
        };
        let entry = self.tenures[record.tenure].entry;
        let id = self.requests.insert(Request::Release {
            keys: self.locks[self.entries[entry].lock].keys.clone(),
            entry,
            op: None,
            is_reported,
        });
        self.begin_release(now, hold, Some(id));
        id
    }

    /// Releases a hold whose guard was dropped.
    pub(crate) fn drop_hold(&mut self, now: Time, hold: HoldId) {
        if self.holds.contains_key(hold) {
            self.begin_release(now, hold, None);
        }
    }

    /// Releases a detached hold of that owner.
    pub(crate) fn unlock(&mut self, now: Time, keys: &Keys, kind: Kind, owner: Owner) -> RequestId {
        let entry = self.entry_id(keys, owner);
        let id = self.requests.insert(Request::Release {
            keys: keys.clone(),
            entry,
            op: None,
            is_reported: true,
        });
        if self.is_closed() {
            self.complete(id, Outcome::Failed(self.closed()));
            return id;
        }
        let tenure = self.live_tenure(now, entry);
        let holds = tenure.map_or(&[][..], |tenure| &self.tenures[tenure].holds);
        let detached = holds
            .iter()
            .rev()
            .find(|hold| self.holds[**hold].state.is_detached());
        if let Some(hold) = detached.copied() {
            self.begin_release(now, hold, Some(id));
        } else if tenure.map_or(!owner.is_private(), |tenure| self.tenures[tenure].base > 0) {
            let op = Op::new(entry, kind, Some(id), Action::Unrecorded(None));
            self.limit_release(now, id);
            self.push_op(now, op);
        } else {
            let has_operations = self.entries[entry].has_operations();
            let error = self.claim_loss(now, entry);
            let error =
                error.unwrap_or_else(|| self.not_held(entry, tenure.is_some() || has_operations));
            self.complete(id, Outcome::Failed(error));
        }
        id
    }

    /// Counts a release whose failure its caller does not get to see.
    pub(crate) fn count_failed_release(&mut self) {
        self.stats.failed_releases += 1;
    }

    fn not_held(&self, entry: EntryId, has_tenure: bool) -> Error {
        let owner = self.owner_name(entry);
        Error::NotHeld {
            lock: self.lock_name(entry),
            problem: if has_tenure {
                format!("{owner} has no detached hold")
            } else {
                format!("{owner} does not hold it")
            },
        }
    }

    fn begin_release(&mut self, now: Time, hold: HoldId, request: Option<RequestId>) {
        let tenure = self.holds[hold].tenure;
        let entry = self.tenures[tenure].entry;
        // What is lost needs no turn to be reported: an earlier operation may wait for the server
        // for long.
        if let Some(reason) = self.tenure_lost(now, tenure) {
            let error = self.lost_error(entry, reason);
            if let Some(request) = request {
                self.complete(request, Outcome::Failed(error));
            }
            self.end_lost_hold(now, hold);
            return;
        }
        if let Some(next) = self.successor(now, hold) {
            self.pass_on(now, hold, next, request);
            return;
        }
        let was_guarded = self.holds[hold].state == HoldState::Guarded;
        self.holds[hold].state = HoldState::Leaving;
        let release = Release {
            hold,
            tenure,
            was_guarded,
            taken: None,
            leave: 0,
            stay: None,
            is_last: false,
        };
        let kind = self.tenures[tenure].kind;
        let op = Op::new(entry, kind, request, Action::Release(release));
        if let Some(request) = request {
            self.limit_release(now, request);
        }
        self.push_op(now, op);
    }

    /// A caller waits for a release no longer than this.
    pub(super) fn limit_release(&mut self, now: Time, request: RequestId) {
        let limit = now + self.settings.patience();
        self.timers.set(Timer::Request(request), limit);
    }

    /// The caller of a release has waited long enough. The release continues without it.
    pub(super) fn release_limit_reached(&mut self, id: RequestId, lock: String, op: Option<OpId>) {
        let patience = self.settings.patience();
        let (mut refusal, mut unsent) = (None, None);
        if let Some(op) = op.and_then(|op| self.ops.get_mut(op)) {
            op.request = None;
            (refusal, unsent) = (op.refusal.clone(), op.unsent.clone());
        }
        let address = &self.settings.address;
        let detail = match (unsent, refusal) {
            (Some(problem), _) => {
                format!("not done within {patience:?}, no connection to {address}: {problem}")
            }
            (None, Some(message)) => {
                format!("not done within {patience:?}, the server refused it: {message}")
            }
            (None, None) => format!("{address}: no reply within {patience:?}"),
        };
        let error = Error::OutcomeUnknown {
            lock,
            step: Step::Release,
            detail,
        };
        self.complete(id, Outcome::Failed(error));
    }

    fn releasing(&mut self, id: OpId) -> &mut Release {
        match &mut self.ops[id].action {
            Action::Release(release) => release,
            action => unreachable!("the operation releases: {action:?}"),
        }
    }

    /// Takes the hold out of the record, then off the server.
    pub(super) fn start_release(&mut self, now: Time, id: OpId) {
        let release = self.releasing(id);
        let (hold, tenure_id) = (release.hold, release.tenure);
        if let Some(reason) = self.tenure_lost(now, tenure_id) {
            self.release_was_lost(now, id, reason);
            return;
        }
        let Some(taken) = self.holds.remove(hold) else {
            self.finish_op(now, id);
            return;
        };
        taken.cell.release();
        let tenure = &mut self.tenures[tenure_id];
        tenure.holds.retain(|other| *other != hold);
        // By our record of the holds, not by the server's count: that may hold what a lost reply
        // left.
        let leave = tenure.base + tenure.holds.len() as i64;
        let is_last = tenure.holds.is_empty();
        let moot = tenure.cell.proved_until().unwrap_or(now);
        let stay = self.entitled(now, tenure_id);
        if is_last {
            self.unlist_tenure(tenure_id);
        } else if let Some(lease) = stay {
            // The script may shorten the expiry to what the remaining holds are entitled to, so
            // from now on no more is proved.
            let tenure = &mut self.tenures[tenure_id];
            tenure.cell.lower(now + lease.provable());
            tenure.lowering += 1;
            self.plan_look(tenure_id);
        }
        let release = self.releasing(id);
        release.taken = Some(taken);
        (release.leave, release.is_last, release.stay) = (leave, is_last, stay);
        // A release is repeated until the lease has run out by itself, and a little longer.
        self.ops[id].backoff = Backoff::new(now, moot.since(now) + self.settings.retry_timeout);
        self.send_release(now, id);
    }

    /// The lease that the holds of a tenure are entitled to. `None` if there are none, or if the
    /// owner has holds of which nothing is known.
    fn entitled(&self, now: Time, tenure: TenureId) -> Option<LeaseTime> {
        let tenure = &self.tenures[tenure];
        if tenure.base > 0 {
            return None;
        }
        let watchdog = self.settings.watchdog;
        tenure
            .holds
            .iter()
            .map(|hold| &self.holds[*hold])
            .map(|hold| match hold.mode {
                Mode::Watchdog => watchdog,
                Mode::Fixed(_) => LeaseTime::at_least(hold.until.since(now)),
            })
            .max()
    }

    pub(super) fn send_release(&mut self, now: Time, id: OpId) {
        let op = &self.ops[id];
        let Action::Release(release) = &op.action else {
            return;
        };
        let call = op
            .kind
            .release(self.target(op.entry), release.leave, release.stay);
        self.send_op(now, id, call);
    }

    pub(super) fn release_replied(&mut self, now: Time, id: OpId, outcome: Result<Reply, Failure>) {
        let op = &self.ops[id];
        let (kind, is_repeated, sent) = (op.kind, op.is_repeated, op.sent);
        let release = self.releasing(id);
        let (tenure, leave, is_last, stay) =
            (release.tenure, release.leave, release.is_last, release.stay);
        let released = match outcome.and_then(|reply| kind.released(reply)) {
            Ok(released) => released,
            Err(failure) => {
                if let Some(failure) = self.repeat_release(now, id, failure) {
                    self.release_was_refused(now, id, failure);
                }
                return;
            }
        };
        if let (false, Some(tenure)) = (is_last, self.tenures.get_mut(tenure)) {
            tenure.lowering += 1;
        }
        match released {
            Released::Freed if is_last => self.release_is_done(now, id),
            // A repeat of our own release finds nothing left.
            Released::Below(0) if is_last && is_repeated => self.release_is_done(now, id),
            // The count that was to be left cannot have freed it, but then nothing is left.
            Released::Freed | Released::Below(0) => {
                self.lose_tenure(now, tenure, LostReason::Gone);
                self.release_was_lost(now, id, LostReason::Gone);
            }
            Released::Left => {
                if let Some(record) = self.tenures.get_mut(tenure) {
                    record.count = leave;
                    if let Some(lease) = stay {
                        record.cell.extend(sent + lease.provable());
                        record.ends = record.ends.max(sent + lease.duration());
                        self.plan_renewal(tenure, sent);
                    }
                }
                self.release_is_done(now, id);
            }
            Released::Below(count) => {
                if let Some(record) = self.tenures.get_mut(tenure) {
                    record.count = count;
                }
                self.release_is_done(now, id);
            }
        }
    }

    /// Has a call of a release repeated. Returns how it failed if it is not.
    fn repeat_release(&mut self, now: Time, id: OpId, failure: Failure) -> Option<Failure> {
        self.note_failure(&failure);
        let op = &mut self.ops[id];
        op.is_repeated |= matches!(failure, Failure::Unknown(_));
        op.unsent = match &failure {
            Failure::NotSent(error) => Some(error.to_string()),
            _ => None,
        };
        if let Failure::Server(error) = &failure {
            op.refusal = Some(error.message().to_owned());
        }
        let is_repeated = op.is_repeated;
        if failure.is_transient() && self.pause_op(now, id) {
            return None;
        }
        Some(match failure {
            Failure::NotSent(error) if is_repeated => Failure::Unknown(error.to_string()),
            Failure::Server(error) if is_repeated && error.kind() != ServerErrorKind::WrongType => {
                Failure::Unknown(format!("the server refused the repetition: {error}"))
            }
            failure => failure,
        })
    }

    fn release_is_done(&mut self, now: Time, id: OpId) {
        let release = self.releasing(id);
        let (tenure, is_last) = (release.tenure, release.is_last);
        if is_last {
            self.confirm_released(self.ops[id].entry);
            self.end_tenure(tenure);
        }
        if let Some(request) = self.ops[id].request.take() {
            self.complete(request, Outcome::Done);
        }
        self.finish_op(now, id);
    }

    /// The hold was lost before the server released it.
    fn release_was_lost(&mut self, now: Time, id: OpId, reason: LostReason) {
        let release = self.releasing(id);
        let (hold, tenure) = (release.hold, release.tenure);
        let error = self.lost_error(self.ops[id].entry, reason);
        if let Some(request) = self.ops[id].request.take() {
            self.complete(request, Outcome::Failed(error));
        }
        self.end_lost_hold(now, hold);
        self.remove_tenure_if_over(now, tenure);
        self.finish_op(now, id);
    }

    /// The server did not release the hold.
    fn release_was_refused(&mut self, now: Time, id: OpId, failure: Failure) {
        let entry = self.ops[id].entry;
        let release = self.releasing(id);
        let (tenure, is_last, hold) = (release.tenure, release.is_last, release.taken.take());
        if matches!(&failure, Failure::Server(error) if error.kind() == ServerErrorKind::WrongType)
        {
            self.lose_tenure(now, tenure, LostReason::Gone);
            self.release_was_lost(now, id, LostReason::Gone);
            return;
        }
        let name = self.lock_name(entry);
        let error = match failure {
            Failure::Unknown(_) => self.unknown(name, Step::Release, failure),
            failure => {
                let was_guarded = self.releasing(id).was_guarded;
                if let (false, Some(hold)) = (was_guarded, hold) {
                    self.put_back(now, tenure, hold);
                } else if is_last {
                    self.leave_tenure_behind(now, tenure);
                }
                self.refused(name, failure)
            }
        };
        if is_last {
            self.end_tenure_without_holds(tenure);
        }
        match self.ops[id].request.take() {
            Some(request) => self.complete(request, Outcome::NotReleased(error)),
            None => self.release_failed(error),
        }
        self.finish_op(now, id);
    }

    /// The caller of a request has gone, and with it the outcome.
    pub(crate) fn discard(&mut self, outcome: Outcome) {
        if let Outcome::NotReleased(error) = outcome {
            self.release_failed(error);
        }
    }

    /// A release failed that nobody waits for.
    fn release_failed(&mut self, error: Error) {
        self.stats.failed_releases += 1;
        let name = error.lock().unwrap_or_default().to_owned();
        self.notice(Notice::ReleaseFailed(name, error));
    }

    /// Turns an operation with an unknown outcome into its settlement: the server is to be left
    /// with `leave`, whatever a copy with that lease did.
    pub(super) fn begin_settlement(&mut self, now: Time, id: OpId, leave: i64, lease: LeaseTime) {
        let op = &mut self.ops[id];
        op.action = Action::Settle(Settle { leave });
        op.is_repeated = false;
        let limit = lease.duration() + self.settings.retry_timeout;
        op.backoff = Backoff::new(now, limit);
        self.send_settle(now, id);
    }

    pub(super) fn send_settle(&mut self, now: Time, id: OpId) {
        let op = &self.ops[id];
        let Action::Settle(Settle { leave }) = op.action else {
            return;
        };
        // The holds that stay are entitled to nothing new.
        let call = op.kind.release(self.target(op.entry), leave, None);
        self.send_op(now, id, call);
    }

    pub(super) fn settle_replied(&mut self, now: Time, id: OpId, outcome: Result<Reply, Failure>) {
        let (kind, entry) = (self.ops[id].kind, self.ops[id].entry);
        if let Err(failure) = outcome.and_then(|reply| kind.released(reply)) {
            let Some(failure) = self.repeat_release(now, id, failure) else {
                return;
            };
            self.stats.failed_releases += 1;
            self.notice(Notice::NotSettled(self.lock_name(entry), failure));
        }
        self.finish_op(now, id);
    }

    pub(super) fn start_clean_up(&mut self, now: Time, id: OpId, base: i64) {
        let entry = self.ops[id].entry;
        if self.live_tenure(now, entry).is_some() {
            // The owner has the lock again: what is on the server is its own.
            self.finish_op(now, id);
        } else {
            self.begin_settlement(now, id, base, self.settings.watchdog);
        }
    }

    pub(super) fn start_unrecorded(&mut self, now: Time, id: OpId) {
        self.ops[id].backoff = Backoff::new(now, self.settings.retry_timeout);
        self.send_unrecorded(now, id);
    }

    pub(super) fn send_unrecorded(&mut self, now: Time, id: OpId) {
        let op = &self.ops[id];
        let target = self.target(op.entry);
        let call = match op.action {
            Action::Unrecorded(Some(count)) => op.kind.release(target, count - 1, None),
            _ => op.kind.count(target),
        };
        self.send_op(now, id, call);
    }

    pub(super) fn unrecorded_replied(
        &mut self,
        now: Time,
        id: OpId,
        outcome: Result<Reply, Failure>,
    ) {
        let op = &self.ops[id];
        let (kind, entry, is_repeated) = (op.kind, op.entry, op.is_repeated);
        let name = self.lock_name(entry);
        let Action::Unrecorded(counted) = op.action else {
            return;
        };
        let result = match counted {
            None => match outcome.and_then(|reply| kind.counted(reply)) {
                Ok(count) => {
                    // What guards stand for, and what is about to be released elsewhere, is not
                    // there to be taken.
                    let live = self.live_tenure(now, entry);
                    let recorded = live.map_or(0, |live| self.tenures[live].holds.len() as i64);
                    if count > recorded {
                        let watchdog = self.settings.watchdog.duration();
                        let limit = watchdog + self.settings.retry_timeout;
                        let op = &mut self.ops[id];
                        op.action = Action::Unrecorded(Some(count));
                        op.backoff = Backoff::new(now, limit);
                        self.send_unrecorded(now, id);
                        return;
                    }
                    Ok(false)
                }
                Err(failure) => {
                    self.note_failure(&failure);
                    if failure.is_transient() && self.pause_op(now, id) {
                        return;
                    }
                    Err(self.refused(name, failure))
                }
            },
            Some(count) => match outcome.and_then(|reply| kind.released(reply)) {
                Ok(released) => {
                    if let Some(live) = self.live_tenure(now, entry) {
                        let live = &mut self.tenures[live];
                        live.base = (live.base - 1).max(0);
                        live.count = count - 1;
                    }
                    Ok(is_repeated || released != Released::Below(0))
                }
                Err(failure) => match self.repeat_release(now, id, failure) {
                    None => return,
                    Some(failure @ Failure::Unknown(_)) => {
                        Err(self.unknown(name, Step::Release, failure))
                    }
                    Some(failure) => Err(self.refused(name, failure)),
                },
            },
        };
        let request = self.ops[id].request.take();
        let outcome = match result {
            Ok(true) => Outcome::Done,
            Ok(false) => {
                let error = self.claim_loss(now, entry);
                Outcome::Failed(error.unwrap_or_else(|| self.not_held(entry, false)))
            }
            Err(error) => Outcome::NotReleased(error),
        };
        match request {
            Some(request) => self.complete(request, outcome),
            None => self.discard(outcome),
        }
        self.finish_op(now, id);
    }

    /// What an unlock has to report that found nothing to release: a detached hold that was lost is
    /// reported once, a guard's for as long as the guard is there.
    fn claim_loss(&mut self, now: Time, entry: EntryId) -> Option<Error> {
        let loss = self.entries[entry].change_past(|past| past.losses.pop());
        if let Some((hold, reason)) = loss {
            self.losses.retain(|(_, other)| *other != hold);
            let error = self.lost_error(entry, reason);
            self.end_lost_hold(now, hold);
            return Some(error);
        }
        // A tenure that is not lost is the latest: the guards of earlier ones are not concerned.
        if self.entries[entry].tenure.is_some() {
            return None;
        }
        let is_guarded = |tenure: &TenureId| {
            let mut holds = self.tenures[*tenure].holds.iter();
            holds.any(|hold| self.holds[*hold].state == HoldState::Guarded)
        };
        let lost = self.entries[entry].past().lost.iter().rev();
        let latest = lost.copied().find(is_guarded)?;
        let reason = self.tenure_lost(now, latest)?;
        Some(errors::lost(self.lock_name(entry), reason))
    }
}

/// How long the server may have a lease after it is over by our clock: its own began when the
/// script arrived.
pub(super) const LATER: Duration = Duration::from_secs(1);
