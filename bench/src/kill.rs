//! Who survives a SIGKILLed peer, and is told.
//!
//! A stream runs until one side is killed. What the other makes of that is seen from outside: its call answers, which it says with the
//! time; or it says nothing, and its count shows whether it hangs or goes on; or it is gone too.

use std::{
    io::BufRead,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::{
    measure::now_ns,
    parameters::{Job, Role},
    report::Outcome,
    systems::{Receiving, Sending, System},
    workload::{Payloads, expected, number, say, whole},
};

/// What a side says by itself, or when it is asked how far it is.
#[derive(Debug, Serialize, Deserialize)]
pub enum Word {
    /// So many messages sent, or taken
    Far(u64),
    /// What it has just noticed
    End {
        /// Told or wrong
        outcome: Outcome,
        /// When
        at_ns: u64,
        /// So many messages sent, or taken
        messages: u64,
        /// By which words it was told
        words: String,
    },
}

/// The order to say how far a side is.
pub const HOW_FAR: &[u8] = b"how far\n";

/// One side's part. It ends when its input does.
pub fn part<S: System>(job: &Job) -> Result<()> {
    let size = job.sizes.max as usize;
    let far = Arc::new(AtomicU64::new(0));
    match job.role {
        Role::Sender => {
            let mut sending = S::sending(job)?;
            let mut payloads = Payloads::new(size);
            stream(job, &far, |n| {
                let sent = sending.send(payloads.prepared(n, size));
                payloads.prepare(n + 1);
                sent.map(|()| true)
            })
        }
        Role::Receiver => {
            let mut receiving = S::receiving(job)?;
            stream(job, &far, |n| {
                receiving.receive(|m| m.len() == size && number(m) == expected(n, m.len()) && whole(m))
            })
        }
        role => bail!("the {} has no part in this", role.name()),
    }
}

/// Sends or takes one message after the other until that fails. `each` answers whether the message was right.
fn stream(job: &Job, far: &Arc<AtomicU64>, mut each: impl FnMut(u64) -> Result<bool>) -> Result<()> {
    say(&"ready")?;
    let mut order = String::new();
    std::io::stdin().lock().read_line(&mut order).context("reading an order")?;
    ensure!(order == "go\n", "found the order {order:?}, wanted \"go\"");
    if job.role.listens() {
        say(&"started")?;
    }
    let asked = far.clone();
    let listener = thread::spawn(move || {
        // Each line asks. At the end of the input this process ends, whatever its other thread waits for.
        for _ in std::io::stdin().lock().lines() {
            let _ = say(&Word::Far(asked.load(Ordering::Relaxed)));
        }
        std::process::exit(0);
    });
    for n in 0.. {
        let (outcome, words) = match each(n) {
            Ok(true) => {
                far.store(n + 1, Ordering::Relaxed); // a count, which nothing else hangs on
                continue;
            }
            Ok(false) => (Outcome::Wrong, format!("message {n} is not the one that was sent")),
            Err(error) => (Outcome::Told, format!("{error:#}")),
        };
        say(&Word::End { outcome, at_ns: now_ns(), messages: n, words })?;
        break;
    }
    let _ = listener.join();
    Ok(())
}
