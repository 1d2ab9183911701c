//! The load of the machine by other programs.

/// The kernel's counts of processor time, in ticks of all processors.
pub struct Load {
    processors: usize,
    busy: u64,
    total: u64,
    /// Of this process, and of its children that have ended.
    own: u64,
}

impl Load {
    /// The counts so far. `None` if the kernel does not give them, as in some sandboxes.
    pub fn now() -> Option<Load> {
        let read = |path| std::fs::read_to_string(path).ok();
        Load::parse(&read("/proc/stat")?, &read("/proc/self/stat")?)
    }

    fn parse(machine: &str, own: &str) -> Option<Load> {
        let numbers = |text: &str| text.split_whitespace().map(|word| word.parse().ok()).collect::<Option<Vec<u64>>>();
        // user, nice, system, idle, iowait, irq, softirq, and steal, which the hypervisor gave to other machines. The
        // rest is part of user and nice.
        let all = numbers(machine.lines().next()?.strip_prefix("cpu ")?)?;
        let [user, nice, system, idle, iowait, irq, softirq, steal] = *all.first_chunk()?;
        let busy = user + nice + system + irq + softirq + steal;
        let is_processor = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
        // After the name in parentheses: utime, stime, cutime and cstime are fields 14 to 17 of proc(5).
        let fields: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
        let own = numbers(&fields.get(11..15)?.join(" "))?.iter().sum();
        Some(Load { processors: machine.lines().filter(is_processor).count(), busy, total: busy + idle + iowait, own })
    }

    /// The machine's processors, and how many of them other programs kept busy since `before`.
    pub fn of_others_since(&self, before: &Load) -> Option<(usize, f64)> {
        let total = self.total.checked_sub(before.total).filter(|total| *total > 0)?;
        let others = self.busy.saturating_sub(before.busy).saturating_sub(self.own.saturating_sub(before.own));
        Some((self.processors, others as f64 / total as f64 * self.processors as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(machine: &str, own: [u64; 4]) -> Load {
        let own = own.map(|ticks| ticks.to_string()).join(" ");
        Load::parse(
            &format!("{machine}\ncpu0 1\ncpu1 1\nintr 7\n"),
            &format!("9 (a (b) 1) R {} {own} 20", "0 ".repeat(10)),
        )
        .unwrap()
    }

    #[test]
    fn others_are_all_that_is_busy_less_this_program() {
        let before = load("cpu  100 0 50 1000 5 0 3 2 0 0", [1, 1, 10, 10]);
        // 198 ticks of two processors: 118 busy, of which 20 are this program's.
        let after = load("cpu  180 10 70 1075 10 1 5 7 0 0", [2, 1, 25, 14]);
        let (processors, busy) = after.of_others_since(&before).unwrap();
        assert_eq!(processors, 2);
        assert!((busy - 2.0 * 98.0 / 198.0).abs() < 1e-9, "{busy}");
        assert!(before.of_others_since(&before).is_none());
    }

    #[test]
    fn this_machine_gives_its_load() {
        assert!(Load::now().is_some_and(|load| load.processors > 0 && load.total > 0));
        assert!(Load::parse("cpu  0 0", "").is_none());
    }
}
