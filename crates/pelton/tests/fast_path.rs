//! The cost of a message while both sides are awake, from the machine code: no atomic read-modify-write, no fence, no
//! system call. Only in an optimised build: `cargo test --release -p pelton --test fast_path`. OBJDUMP names the
//! program that reads the code of another architecture; binutils' `objdump` reads that of this machine.
#![cfg(all(not(debug_assertions), any(target_arch = "x86_64", target_arch = "aarch64")))]

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

const FAST: [&str; 5] = [
    "fast_path_try_send",
    "fast_path_try_receive",
    "fast_path_try_receive_into",
    "fast_path_send_batch",
    "fast_path_receive_batch",
];

/// The instructions of a function of this binary, with their addresses.
fn instructions(function: &str) -> Vec<(u64, String)> {
    disassembled(&[&format!("--disassemble={function}")])
}

fn disassembled(part: &[&str]) -> Vec<(u64, String)> {
    let own = std::env::current_exe().unwrap();
    let objdump = Command::new(std::env::var_os("OBJDUMP").unwrap_or_else(|| "objdump".into()))
        .args(["-d", "--no-show-raw-insn"])
        .args(part)
        .arg(own)
        .output()
        .expect("`objdump` must run: install the package binutils");
    let text = String::from_utf8(objdump.stdout).unwrap();
    let instruction = |line: &str| {
        let (address, code) = line.split_once(":\t")?;
        Some((u64::from_str_radix(address.trim(), 16).unwrap(), code.trim().to_owned()))
    };
    text.lines().filter_map(instruction).collect()
}

/// The probes of this binary: name, address, arguments.
fn probes() -> Vec<(String, u64, String)> {
    let readelf = Command::new("readelf")
        .args(["-n", "--wide"])
        .arg(std::env::current_exe().unwrap())
        .output()
        .expect("`readelf` must run: install the package binutils");
    let text = String::from_utf8(readelf.stdout).unwrap();
    let probe = |text: &str| {
        let field = |name: &str| Some(text.split_once(name)?.1.split(['\n', ',']).next()?.trim().to_owned());
        let address = field("Location: 0x").expect("a probe has an address");
        Some((field("Name:")?, u64::from_str_radix(&address, 16).unwrap(), field("Arguments:").unwrap_or_default()))
    };
    text.split("Provider: pelton\n").skip(1).filter_map(probe).collect()
}

/// Whether the instruction is an atomic read-modify-write, a fence, or a system call.
#[cfg(target_arch = "x86_64")]
fn is_slow(code: &str) -> bool {
    let mnemonic = code.split_whitespace().next().unwrap_or("");
    // An exchange with memory locks implicitly.
    let exchanges = mnemonic.starts_with("xchg") && code.contains('(');
    exchanges || ["lock", "mfence", "sfence", "lfence", "syscall", "cpuid"].contains(&mnemonic)
}

/// Whether the instruction is an atomic read-modify-write, a fence, or a system call. None of these are `ldar` and
/// `ldapr`, loads that acquire, and `stlr`, a store that releases.
#[cfg(target_arch = "aarch64")]
fn is_slow(code: &str) -> bool {
    let mnemonic = code.split_whitespace().next().unwrap_or("");
    let fences = ["dmb", "dsb", "isb", "svc"].contains(&mnemonic);
    // Exclusive pairs, the instructions of ARMv8.1, and the compiler's functions that choose between the two.
    let exclusive = ["ldxr", "ldaxr", "stxr", "stlxr", "ldxp", "ldaxp", "stxp", "stlxp"];
    let single = ["cas", "swp", "ldadd", "ldclr", "ldset", "ldeor", "ldsmax", "ldsmin", "ldumax", "ldumin"];
    let updates = exclusive.iter().chain(&single).any(|name| mnemonic.starts_with(name));
    fences || updates || code.contains("<__aarch64_")
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
    for function in FAST {
        let instructions = instructions(function);
        assert!(instructions.len() > 30, "{function} is inlined nowhere else, so it must be here: {instructions:?}");
        for (_, code) in &instructions {
            assert!(!is_slow(code), "{function}: {code}");
        }
        println!("{function}: {} instructions with all its inlined error paths", instructions.len());
    }
}

#[test]
fn a_probe_is_one_nop_and_the_fast_path_has_none() {
    // So that they are in this binary.
    let (mut sender, mut receiver) = Options::new().capacity(1 << 16).threads().unwrap();
    while fast_path_try_send(&mut sender, &[1; 16]) {}
    assert_eq!(fast_path_try_receive(&mut receiver), 16);
    let probes = probes();
    for (name, arguments) in [("send", 2), ("receive", 2), ("sleep", 0), ("wake", 1), ("full", 1)] {
        assert!(probes.iter().any(|(of, ..)| of == name), "no probe {name}: {probes:x?}");
        for (_, address, found) in probes.iter().filter(|(of, ..)| of == name) {
            assert_eq!(found.split_whitespace().count(), arguments, "{name}: {found}");
            let end = address + if cfg!(target_arch = "x86_64") { 1 } else { 4 };
            let code = disassembled(&[&format!("--start-address={address}"), &format!("--stop-address={end}")]);
            assert_eq!(
                code.iter().map(|(_, code)| code.as_str()).collect::<Vec<_>>(),
                ["nop"],
                "{name} at {address:x}"
            );
        }
    }
    assert!(probes.iter().all(|(name, ..)| ["send", "receive", "sleep", "wake", "full"].contains(&name.as_str())));
    for function in FAST {
        let code = instructions(function);
        let has_probe = |(_, address, _): &&(String, u64, String)| code.iter().any(|(at, _)| at == address);
        assert_eq!(probes.iter().find(has_probe), None, "{function}");
    }
}
