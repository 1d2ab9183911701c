//! The cost of a message while both sides are awake, from the machine code: no lock prefix, no fence, no system call.
//! Only in an optimised build: `cargo test --release -p pelton --test fast_path`.
#![cfg(all(not(debug_assertions), target_arch = "x86_64"))]

use pelton::{Options, Receiver, Sender, Sent};
use std::process::Command;

#[unsafe(no_mangle)]
#[inline(never)]
fn fast_path_try_send(sender: &mut Sender, payload: &[u8]) -> bool {
    matches!(sender.try_send(payload), Ok(Sent::Sent))
}

#[unsafe(no_mangle)]
#[inline(never)]
fn fast_path_try_receive(receiver: &mut Receiver) -> u64 {
    match receiver.try_receive() {
        Ok(Some(message)) => message.iter().map(|byte| u64::from(*byte)).sum(),
        _ => 0,
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn fast_path_try_receive_into(receiver: &mut Receiver, buffer: &mut Vec<u8>) -> usize {
    receiver.try_receive_into(buffer).ok().flatten().unwrap_or(0)
}

#[unsafe(no_mangle)]
#[inline(never)]
fn fast_path_send_batch(sender: &mut Sender, payloads: &[&[u8]]) -> bool {
    let Ok(Some(mut batch)) = sender.try_reserve_batch(payloads.iter().map(|payload| payload.len())) else {
        return false;
    };
    payloads.iter().all(|payload| batch.push(payload)) && batch.commit().is_ok()
}

#[unsafe(no_mangle)]
#[inline(never)]
fn fast_path_receive_batch(receiver: &mut Receiver) -> usize {
    let Ok(Some(mut batch)) = receiver.try_receive_batch() else { return 0 };
    let mut bytes = 0;
    while let Ok(Some(message)) = batch.next() {
        bytes += message.len();
    }
    bytes
}

/// The instructions of a function of this binary.
fn instructions(function: &str) -> Vec<String> {
    let own = std::env::current_exe().unwrap();
    let objdump = Command::new("objdump")
        .args(["-d", "--no-show-raw-insn", &format!("--disassemble={function}")])
        .arg(own)
        .output()
        .expect("`objdump` must run: install the package binutils");
    let text = String::from_utf8(objdump.stdout).unwrap();
    let body = text.split_once(&format!("<{function}>:\n")).unwrap_or_else(|| panic!("no {function} in:\n{text}")).1;
    let body = body.split("\n\n").next().unwrap();
    body.lines().filter_map(|line| line.split_once(":\t")).map(|(_, code)| code.trim().to_owned()).collect()
}

#[test]
fn a_message_costs_no_lock_no_fence_and_no_system_call() {
    let (mut sender, mut receiver) = Options::new().threads().unwrap();
    let mut buffer = Vec::new();
    for _ in 0..3 {
        assert!(fast_path_try_send(&mut sender, &[1; 16]));
        assert!(fast_path_try_send(&mut sender, &[2; 16]));
        assert_eq!(fast_path_try_receive(&mut receiver), 16);
        assert_eq!(fast_path_try_receive_into(&mut receiver, &mut buffer), 16);
        assert!(fast_path_send_batch(&mut sender, &[&[3; 16], &[4; 100]]));
        assert_eq!(fast_path_receive_batch(&mut receiver), 116);
    }
    for function in [
        "fast_path_try_send",
        "fast_path_try_receive",
        "fast_path_try_receive_into",
        "fast_path_send_batch",
        "fast_path_receive_batch",
    ] {
        let instructions = instructions(function);
        assert!(instructions.len() > 30, "{function} is inlined nowhere else, so it must be here: {instructions:?}");
        for code in &instructions {
            let mnemonic = code.split_whitespace().next().unwrap_or("");
            // An exchange with memory locks implicitly.
            let exchanges = mnemonic.starts_with("xchg") && code.contains('(');
            let fences = ["lock", "mfence", "sfence", "lfence", "syscall", "cpuid"].contains(&mnemonic);
            assert!(!exchanges && !fences, "{function}: {code}");
        }
        println!("{function}: {} instructions with all its inlined error paths", instructions.len());
    }
}
