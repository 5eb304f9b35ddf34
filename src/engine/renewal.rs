//! The watchdog: renews leases in batches, and finds tenures whose proof is over.

use std::time::Duration;

use super::notice::Notice;
use super::{Engine, Purpose, TenureId};
use crate::error::{LostReason, ServerError, ServerErrorKind};
use crate::kind::{Kind, Renewed};
use crate::time::Time;
use crate::wire::{Failure, Reply};

/// One renewal call.
#[derive(Debug)]
pub(super) struct RenewalBatch {
    kind: Kind,
    /// It was not sent before.
    pub(super) sent: Time,
    /// The tenures, each with its count of releases that shorten the expiry.
    tenures: Vec<(TenureId, u32)>,
}

impl Engine {
    /// Plans the next renewal after a confirmed script that was sent at that time.
    pub(super) fn plan_renewal(&mut self, id: TenureId, sent: Time) {
        self.tenures[id].due = sent + self.settings.watchdog.duration() / 3;
        self.plan_look(id);
    }

    /// Plans the next look at a tenure: for its renewal, and never later than its proof ends.
    pub(super) fn plan_look(&mut self, id: TenureId) {
        let Some(proved_until) = self.tenures[id].cell.proved_until() else {
            return;
        };
        let at = if self.is_renewed(id) {
            self.tenures[id].due.min(proved_until)
        } else {
            proved_until
        };
        self.schedule(id, at);
    }

    /// Looks at each tenure that is due, and renews what has to be renewed.
    pub(super) fn look_at_tenures(&mut self, now: Time) {
        if self.schedule.first().is_none_or(|(at, _)| *at > now) {
            return;
        }
        // What is due a little later is renewed, too, so that batches fill.
        let soon = now + self.settings.watchdog.duration() / 60;
        let mut due = Vec::new();
        while let Some((at, id)) = self.schedule.first().copied().filter(|(at, _)| *at <= soon) {
            self.unschedule(id);
            due.push((at, id));
        }
        let mut to_renew = Vec::new();
        for (_, id) in due {
            if !self.tenures.contains_key(id) {
                continue;
            }
            if self.tenure_lost(now, id).is_some() {
                if self.tenures.contains_key(id) {
                    self.clean_up(now, id);
                }
                continue;
            }
            let tenure = &self.tenures[id];
            if tenure.holds.is_empty() {
                continue;
            }
            if tenure.is_renewing || !self.is_renewed(id) || tenure.due > soon {
                let is_idle = !tenure.is_renewing;
                let proved_until = tenure.cell.proved_until();
                if is_idle {
                    self.plan_look(id);
                } else if let Some(at) = proved_until {
                    self.schedule(id, at);
                }
                continue;
            }
            self.tenures[id].is_renewing = true;
            // Whatever becomes of the renewal, the end of the proof is looked at.
            if let Some(at) = self.tenures[id].cell.proved_until() {
                self.schedule(id, at);
            }
            to_renew.push(id);
        }
        self.renew(now, to_renew);
    }

    fn renew(&mut self, now: Time, due: Vec<TenureId>) {
        let mut batches: Vec<Vec<TenureId>> = Vec::new();
        for id in due {
            let tenure = &self.tenures[id];
            // One that was refused would have the others of its batch refused, too.
            let last = batches.last_mut().filter(|batch| {
                let first = &self.tenures[batch[0]];
                let is_refused = tenure.is_refused || first.is_refused;
                !is_refused
                    && first.kind.is_renewed_with(tenure.kind)
                    && batch.len() < self.settings.renewal_batch
            });
            match last {
                Some(batch) => batch.push(id),
                None => batches.push(vec![id]),
            }
        }
        for batch in batches {
            self.send_renewal(now, batch);
        }
    }

    fn send_renewal(&mut self, now: Time, ids: Vec<TenureId>) {
        let kind = self.tenures[ids[0]].kind;
        let targets = ids.iter().map(|id| self.target(self.tenures[*id].entry));
        let call = kind.renew(targets, self.settings.watchdog);
        let tenures = ids
            .into_iter()
            .map(|id| (id, self.tenures[id].lowering))
            .collect();
        let batch = RenewalBatch {
            kind,
            sent: now,
            tenures,
        };
        self.send(Purpose::Renewal(batch), call);
    }

    pub(super) fn renewal_replied(
        &mut self,
        now: Time,
        batch: RenewalBatch,
        outcome: Result<Reply, Failure>,
    ) {
        let RenewalBatch {
            kind,
            sent,
            mut tenures,
        } = batch;
        let answers = match outcome.and_then(|reply| kind.renewed(reply, tenures.len())) {
            Ok(answers) => answers,
            Err(Failure::Server(error)) if concerns_a_key(&error) && tenures.len() > 1 => {
                // The server refused the script for one of its keys: renew each by itself.
                tenures.retain(|(id, _)| self.tenures.contains_key(*id));
                for (id, _) in tenures {
                    self.send_renewal(now, vec![id]);
                }
                return;
            }
            Err(Failure::Server(error)) if concerns_a_key(&error) => vec![Renewed::Refused(error)],
            Err(failure) => {
                self.renewals_fail(now, failure, tenures.iter().map(|(id, _)| *id));
                return;
            }
        };
        // A server that is no master, or that lacks replicas, refuses every lock alike.
        let outage = answers.iter().find_map(|answer| match answer {
            Renewed::Refused(error) if !concerns_a_key(error) => Some(error.clone()),
            _ => None,
        });
        match outage {
            Some(error) => {
                self.note_refusal(&error);
                self.note_outage(Failure::Server(error));
            }
            None if std::mem::replace(&mut self.outage, false) => {
                self.notice(Notice::RenewalOutageOver);
            }
            None => {}
        }
        for ((id, lowering), answer) in tenures.into_iter().zip(answers) {
            self.renewed(now, sent, id, lowering, answer);
        }
    }

    fn renewed(&mut self, now: Time, sent: Time, id: TenureId, lowering: u32, answer: Renewed) {
        let Some(tenure) = self.tenures.get_mut(id) else {
            return;
        };
        tenure.is_renewing = false;
        let is_held = !tenure.holds.is_empty() && tenure.cell.lost(now).is_none();
        match answer {
            Renewed::Yes => {
                tenure.is_refused = false;
                self.stats.renewals += 1;
                let lease = self.settings.watchdog;
                if tenure.cell.lost(now).is_some() {
                    // Too late for its owners: what it was renewed for is not kept as long.
                    self.look_again(now, id);
                } else if tenure.lowering == lowering {
                    tenure.cell.extend(sent + lease.provable());
                    tenure.ends = tenure.ends.max(sent + lease.duration());
                    if is_held {
                        self.plan_renewal(id, sent);
                    }
                } else if is_held {
                    self.plan_look(id);
                }
            }
            // A release that overtook the renewal has ended the tenure, and nothing is lost.
            Renewed::Gone if !is_held => self.look_again(now, id),
            Renewed::Gone => {
                self.lose_tenure(now, id, LostReason::Gone);
            }
            Renewed::Refused(error) if error.kind() == ServerErrorKind::WrongType => {
                self.lose_tenure(now, id, LostReason::Gone);
            }
            Renewed::Refused(error) => {
                let is_of_key = concerns_a_key(&error);
                if is_of_key && !std::mem::replace(&mut tenure.is_refused, true) {
                    let entry = tenure.entry;
                    let subject = self.subject(entry);
                    self.notice(Notice::RenewalRefused(subject, error));
                }
                self.renew_again(now, id);
            }
        }
    }

    /// A tenure that was lost or ended while its renewal was in flight.
    fn look_again(&mut self, now: Time, id: TenureId) {
        if self.tenure_lost(now, id).is_some() && self.tenures.contains_key(id) {
            self.clean_up(now, id);
        }
    }

    fn renewals_fail(
        &mut self,
        now: Time,
        failure: Failure,
        tenures: impl Iterator<Item = TenureId>,
    ) {
        self.note_failure(&failure);
        self.note_outage(failure);
        for id in tenures {
            if let Some(tenure) = self.tenures.get_mut(id) {
                tenure.is_renewing = false;
                self.renew_again(now, id);
            }
        }
    }

    /// Reports an outage once, not with each renewal.
    fn note_outage(&mut self, failure: Failure) {
        if !std::mem::replace(&mut self.outage, true) {
            self.notice(Notice::RenewalOutage(failure));
        }
    }

    /// Plans another renewal soon.
    fn renew_again(&mut self, now: Time, id: TenureId) {
        let watchdog = self.settings.watchdog.duration();
        let pause = if self.tenures[id].is_refused {
            // Each of these is a call of its own.
            watchdog / 6
        } else {
            (watchdog / 30).clamp(Duration::from_millis(5), Duration::from_millis(500))
        };
        if self.tenure_lost(now, id).is_some() {
            self.look_again(now, id);
        } else if !self.tenures[id].holds.is_empty() {
            self.tenures[id].due = now + pause;
            self.plan_look(id);
        }
    }
}

/// Whether a refusal is of one of the keys named, rather than of the script.
fn concerns_a_key(error: &ServerError) -> bool {
    match error.kind() {
        ServerErrorKind::Cluster | ServerErrorKind::WrongType => true,
        ServerErrorKind::NoPermission => error.message().contains("key"),
        // A garbled value under the key, a refusal that names no state of the server.
        ServerErrorKind::Other => true,
        _ => false,
    }
}
