//! The threads' channel, for sanitizers: no test harness, of which ThreadSanitizer tells races that are none.
//! `verify/run tools` runs it under them. `PELTON_ROUNDS` makes it long.
//!
//! ThreadSanitizer does not know what fences do. Between threads of a process with membarrier there is none on the way.

use pelton::Options;

fn main() {
    let rounds: u64 = std::env::var("PELTON_ROUNDS").map_or(20_000, |text| text.parse().unwrap());
    let (mut sender, mut receiver) = Options::new().capacity(4096).threads().unwrap();
    let size = |number: u64| (number * 31 % 700) as usize;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut bytes = Vec::new();
            for number in 0..rounds {
                bytes.clear();
                bytes.resize(size(number), number as u8);
                sender.send(&bytes).unwrap();
            }
            assert!(sender.drain_until(std::time::Instant::now() + std::time::Duration::from_secs(60)).unwrap());
            sender.close().unwrap();
        });
        let mut buffer = Vec::new();
        for number in 0..rounds {
            // By turns in place, copied, and in batches of one.
            if number % 2 == 0 {
                let message = receiver.receive().unwrap();
                assert_eq!(message.len(), size(number));
                assert!(message.iter().all(|byte| *byte == number as u8));
            } else {
                let bytes = receiver.receive_into(&mut buffer).unwrap();
                assert_eq!(bytes, size(number));
                assert!(buffer.iter().all(|byte| *byte == number as u8));
            }
        }
        assert!(receiver.receive().unwrap_err().is_closed());
    });
    println!("{rounds} messages");
}
