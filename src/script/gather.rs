//! Calls of one script that are made as one call: much of a script's cost is its being called
//! (`docs/performance.md`).

use std::collections::HashMap;

use bytes::Bytes;
use smallvec::SmallVec;

use crate::wire::{Call, Failure, Reply};

/// Calls of one script that are made together, each with its id.
#[derive(Debug, Clone)]
pub(crate) struct Gathered<T> {
    parts: Parts<T, Call>,
    locks: usize,
}

type Parts<T, U> = SmallVec<[(T, U); 1]>;

/// The outcome of gathered calls.
#[derive(Debug)]
pub(crate) enum Answered<T> {
    /// Of each.
    Each(Parts<T, Result<Reply, Failure>>),
    /// The server refused to run the script, perhaps because of one of the locks only: each is to
    /// be made by itself.
    Refused(Parts<T, Call>),
}

/// Gathers calls, at most `most` locks in one unless a call is for more. The calls for a key stay
/// in order.
pub(crate) fn gather<T>(
    calls: impl IntoIterator<Item = (T, Call)>,
    most: usize,
) -> Vec<Gathered<T>> {
    let mut all: Vec<Gathered<T>> = Vec::new();
    // The last one of each script, and of each key.
    let mut open: SmallVec<[(&'static str, usize); 12]> = SmallVec::new();
    let mut used: HashMap<Bytes, usize> = HashMap::new();
    for (id, call) in calls {
        let is_same = |(sha1, _): &(&str, usize)| *sha1 == call.script.sha1 && call.locks > 0;
        let of_script = open.iter().position(is_same);
        let joined = of_script.map(|at| open[at].1).filter(|index| {
            let is_last = |key| used.get(key).is_none_or(|last| last <= index);
            all[*index].locks + call.locks <= most && call.keys.iter().all(is_last)
        });
        let index = joined.unwrap_or(all.len());
        used.extend(call.keys.iter().map(|key| (key.clone(), index)));
        if joined.is_some() {
            all[index].locks += call.locks;
            all[index].parts.push((id, call));
            continue;
        }
        match of_script {
            Some(at) => open[at].1 = index,
            None => open.push((call.script.sha1, index)),
        }
        all.push(Gathered::alone(id, call));
    }
    all
}

impl<T> Gathered<T> {
    /// One call by itself.
    pub(crate) fn alone(id: T, call: Call) -> Self {
        Self {
            locks: call.locks,
            parts: SmallVec::from_buf([(id, call)]),
        }
    }

    /// How many locks it is for.
    pub(crate) fn locks(&self) -> usize {
        self.locks.max(1)
    }

    /// The call that is made.
    pub(crate) fn call(&mut self) -> Call {
        if let [(_, call)] = &mut self.parts[..] {
            // It is not made again.
            let (keys, args) = (
                std::mem::take(&mut call.keys),
                std::mem::take(&mut call.args),
            );
            return Call {
                keys,
                args,
                ..*call
            };
        }
        let calls = || self.parts.iter().map(|(_, call)| call);
        Call {
            script: self.parts[0].1.script,
            locks: self.locks,
            keys: calls().flat_map(|call| &call.keys).cloned().collect(),
            args: calls().flat_map(|call| &call.args).cloned().collect(),
        }
    }

    #[cfg(test)]
    pub(crate) fn first(&self) -> T
    where
        T: Copy,
    {
        self.parts[0].0
    }

    #[cfg(test)]
    pub(crate) fn ids(&self) -> impl Iterator<Item = &T> {
        self.parts.iter().map(|(id, _)| id)
    }

    /// What the outcome of the call means for each of them.
    pub(crate) fn answered(mut self, outcome: Result<Reply, Failure>) -> Answered<T> {
        if self.parts.len() == 1 {
            let alone = self.parts.drain(..).map(|(id, _)| id);
            return Answered::Each(alone.zip([outcome]).collect());
        }
        let mut values = match outcome {
            Ok(Reply::List(values)) if values.len() == 2 * self.locks => values.into_iter(),
            // A script answers for each lock. Where it fails as a whole, none of it has run, or a
            // second run changes nothing more.
            Err(failure @ Failure::Server(_)) if !failure.is_transient() => {
                return Answered::Refused(self.parts);
            }
            Ok(reply) => {
                let failure = Failure::Unknown(format!("malformed reply: {reply:?}"));
                return Answered::Each(each(self.parts, |_| Err(failure.clone())));
            }
            Err(failure) => return Answered::Each(each(self.parts, |_| Err(failure.clone()))),
        };
        Answered::Each(each(self.parts, |call| {
            Ok(Reply::List(values.by_ref().take(2 * call.locks).collect()))
        }))
    }
}

fn each<T, U>(parts: Parts<T, Call>, mut outcome: impl FnMut(Call) -> U) -> Parts<T, U> {
    let parts = parts.into_iter();
    parts.map(|(id, call)| (id, outcome(call))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ServerError;
    use crate::script::catalog::{ACQUIRE, INSPECT, RELEASE};

    const MOST: usize = 5;

    /// A call of one of three scripts, for locks of few names. Arguments tell where they belong.
    fn call(id: usize, script: usize, names: &[u8]) -> Call {
        let script = [&ACQUIRE, &RELEASE, &INSPECT][script];
        let takes_one = script.source() == INSPECT.source();
        let names = if takes_one { &names[..1] } else { names };
        Call {
            script: script.source(),
            locks: if takes_one { 0 } else { names.len() },
            keys: names.iter().map(|name| Bytes::from(vec![*name])).collect(),
            args: names
                .iter()
                .map(|name| Bytes::from(format!("{id} {name}")))
                .collect(),
        }
    }

    fn calls() -> impl Strategy<Value = Vec<(usize, Call)>> {
        let names = prop::collection::vec(0..6_u8, 1..8);
        let call_of = (0..3_usize, names);
        prop::collection::vec(call_of, 0..40).prop_map(|calls| {
            let calls = calls.into_iter().enumerate();
            calls
                .map(|(id, (script, names))| (id, call(id, script, &names)))
                .collect()
        })
    }

    fn error(text: &str) -> Failure {
        Failure::Server(ServerError::from(text))
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 1_000, ..Default::default() })]

        #[test]
        fn each_call_is_made_once_and_in_order_for_its_keys(calls in calls()) {
            let mut all = gather(calls.clone(), MOST);
            let order: Vec<_> = all.iter().flat_map(Gathered::ids).copied().collect();
            let mut ids = order.clone();
            ids.sort_unstable();
            prop_assert!(ids.iter().copied().eq(0..calls.len()));
            for key in 0..6_u8 {
                let uses = |id: &usize| calls[*id].1.keys.contains(&Bytes::from(vec![key]));
                prop_assert!(order.iter().copied().filter(uses).is_sorted());
            }
            for gathered in &mut all {
                let ids: Vec<_> = gathered.ids().copied().collect();
                let made = gathered.call();
                prop_assert!(ids.len() == 1 || (2..=MOST).contains(&made.locks));
                prop_assert!(ids.iter().all(|id| calls[*id].1.script == made.script));
                let keys = ids.iter().flat_map(|id| &calls[*id].1.keys);
                prop_assert!(made.keys.iter().eq(keys));
                let args = ids.iter().flat_map(|id| &calls[*id].1.args);
                prop_assert!(made.args.iter().eq(args));
            }
        }

        #[test]
        fn each_call_gets_the_part_of_the_reply_for_its_locks(calls in calls()) {
            for mut gathered in gather(calls.clone(), MOST) {
                let made = gathered.call();
                let pairs = made.args.iter().flat_map(|arg| [Reply::Int(1), Reply::Text(arg.clone())]);
                let Answered::Each(each) = gathered.answered(Ok(Reply::List(pairs.collect()))) else {
                    panic!("not refused");
                };
                for (id, outcome) in each {
                    let args = calls[id].1.args.iter();
                    let pairs = args.flat_map(|arg| [Reply::Int(1), Reply::Text(arg.clone())]);
                    prop_assert_eq!(outcome, Ok(Reply::List(pairs.collect())));
                }
            }
        }
    }

    /// Two calls that are made as one.
    fn two() -> Gathered<usize> {
        let calls = [(0, call(0, 0, &[1])), (1, call(1, 0, &[2]))];
        let mut all = gather(calls, MOST);
        assert_eq!(all.len(), 1);
        let mut gathered = all.remove(0);
        assert_eq!(gathered.call().keys.len(), 2);
        gathered
    }

    #[test]
    fn refused_calls_are_to_be_made_one_by_one() {
        let Answered::Refused(calls) = two().answered(Err(error("NOPERM no access to a key")))
        else {
            panic!("answered");
        };
        let keys: Vec<_> = calls
            .iter()
            .map(|(id, call)| (*id, &call.keys[0][..]))
            .collect();
        assert_eq!(keys, [(0, &[1][..]), (1, &[2][..])]);
    }

    #[test]
    fn other_failures_are_the_outcome_of_each_call() {
        let lost = Failure::Unknown("lost".into());
        let malformed = Reply::List(vec![Reply::Int(1), Reply::Int(1)]);
        for outcome in [
            Err(error("BUSY a script runs")),
            Err(lost),
            Err(Failure::Closed),
            Ok(malformed),
        ] {
            let Answered::Each(each) = two().answered(outcome.clone()) else {
                panic!("refused");
            };
            assert_eq!(each.len(), 2);
            for (_, this) in each {
                match &outcome {
                    Err(failure) => assert_eq!(this, Err(failure.clone())),
                    Ok(_) => assert!(matches!(this, Err(Failure::Unknown(_)))),
                }
            }
        }
    }
}
