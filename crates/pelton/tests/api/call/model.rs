//! Random calls, replies, cancels and ends, compared with a model without lanes.

use super::*;

/// The expected result of a call, by a model without lanes.
#[derive(Default)]
struct Modelled {
    /// Replies sent and not received yet.
    due: VecDeque<(Outcome, Vec<u8>)>,
    is_cancelled: bool,
}

#[test]
fn random_calls_and_replies_behave_as_the_model() {
    let dir = TestDir::new("model");
    let rounds = std::env::var("PELTON_ROUNDS").map_or(20, |text| text.parse().unwrap());
    let first = std::env::var("PELTON_SEED").map_or(1, |text| text.parse().unwrap());
    for seed in first..first + rounds {
        println!("PELTON_SEED={seed}");
        one_by_the_model(&dir.name(), &mut Random::new(seed));
    }
}

fn one_by_the_model(name: &str, random: &mut Random) {
    let mut service = pelton::Service::listen_with(name, &tiny()).unwrap();
    let connecting = std::thread::spawn({
        let name = name.to_owned();
        move || pelton::Client::connect_with(&name, &tiny()).unwrap()
    });
    while !connecting.is_finished() {
        assert!(service.receive_until(Instant::now() + Duration::from_millis(1)).unwrap().is_none());
    }
    let mut client = connecting.join().unwrap();
    let mut calls: BTreeMap<CallId, Modelled> = BTreeMap::new();
    let mut requested: VecDeque<(CallId, Vec<u8>)> = VecDeque::new();
    let mut taken: Vec<(CallId, Responder)> = Vec::new();
    let mut ids: Vec<CallId> = Vec::new();
    let mut steps = 0u64;
    while steps < 600 || !calls.is_empty() {
        steps += 1;
        assert!(steps < 100_000, "it does not end");
        let bytes = match random.below(20) {
            0 => random.below(150_000),
            1..4 => random.below(30_000),
            _ => random.below(200),
        } as usize;
        let payload = numbered(steps, bytes);
        match random.below(10) {
            0..3 if steps < 600 => {
                if let Some(call) = client.try_submit(&payload).unwrap() {
                    assert!(calls.insert(call, Modelled::default()).is_none(), "{call:?} in use");
                    requested.push_back((call, payload));
                    ids.push(call);
                }
            }
            3 if !ids.is_empty() && steps < 600 => {
                let call = ids[random.below(ids.len() as u64) as usize];
                let is_open = calls.get(&call).is_some_and(|modelled| !modelled.is_cancelled);
                assert_eq!(client.cancel(call).unwrap(), is_open, "{call:?}");
                if let Some(modelled) = calls.get_mut(&call) {
                    modelled.is_cancelled = true;
                    // The client receives nothing more of it, and no report of its end.
                    modelled.due.clear();
                }
            }
            0..6 => {
                if let Some(request) = service.try_receive().unwrap() {
                    let (call, wanted) = requested.pop_front().expect("a request is open");
                    assert!(*request == *wanted, "{call:?}");
                    taken.push((call, request.into_responder()));
                }
            }
            6..8 if !taken.is_empty() => {
                let slot = random.below(taken.len() as u64) as usize;
                let (call, responder) = &mut taken[slot];
                let call = *call;
                let outcome = match random.below(6) {
                    0 | 1 => match responder.try_part(&payload).unwrap() {
                        Sent::Sent => Outcome::Part,
                        _ => continue,
                    },
                    2 => {
                        taken.swap_remove(slot).1.end().unwrap();
                        Outcome::End
                    }
                    3 => {
                        drop(taken.swap_remove(slot));
                        Outcome::Abandoned
                    }
                    4 => {
                        taken.swap_remove(slot).1.fail(steps as u32, &payload).unwrap();
                        Outcome::Failed(steps as u32)
                    }
                    _ => {
                        taken.swap_remove(slot).1.reply(&payload).unwrap();
                        Outcome::Reply
                    }
                };
                let empty = matches!(outcome, Outcome::End | Outcome::Abandoned);
                let modelled = calls.get_mut(&call).expect("it has not ended");
                match modelled.is_cancelled {
                    false => modelled.due.push_back((outcome, if empty { vec![] } else { payload })),
                    true if outcome.is_final() => _ = calls.remove(&call),
                    true => {}
                }
            }
            _ => {
                if let Some(answer) = client.try_completion().unwrap() {
                    let call = answer.call_id();
                    let modelled = calls.get_mut(&call).expect("a call in flight");
                    let (outcome, wanted) = modelled.due.pop_front().expect("it was answered");
                    assert!(answer.outcome() == outcome && *answer == *wanted, "{call:?} {outcome:?}");
                    if outcome.is_final() {
                        calls.remove(&call);
                    }
                }
                // Cancelled after its last reply was sent: nothing of it arrives.
                calls.retain(|call, modelled| {
                    !(modelled.is_cancelled
                        && !taken.iter().any(|(of, _)| of == call)
                        && !requested.iter().any(|(of, _)| of == call))
                });
            }
        }
    }
    // The messages still in flight belong to abandoned calls.
    let until = deadline();
    while client.in_flight() > 0 {
        assert!(client.try_completion().unwrap().is_none());
        if let Some(request) = service.try_receive().unwrap() {
            drop(request);
        }
        assert!(Instant::now() < until, "{} slots are not freed", client.in_flight());
    }
}
