//! What a survivor holds, by kind, and whether that grows with the deaths it lives through.

use super::{
    ledger::{Fault, Kind},
    side::{self, Role},
};
use rustix::process::Pid;
use std::{collections::BTreeMap, fs, path::Path};

/// Open descriptors and file mappings of a process: how many there are of each kind. A kind is the file's path, with `#` for a number
/// in its name, or what the kernel calls an object without a path (`socket:[#]`). The number that a lane's files begin with stays: each
/// of these may be opened late.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings(BTreeMap<String, usize>);

impl Holdings {
    /// Reads them from /proc. Descriptors that a sender keeps in order to send them again do not count, as there are as many as
    /// messages in flight; the sender itself checks that none is left when all are released.
    pub fn of(pid: Pid, role: Role) -> Holdings {
        let of_process = format!("/proc/{}", pid.as_raw_nonzero());
        let mut holdings = Holdings::default();
        for entry in fs::read_dir(format!("{of_process}/fd")).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            if role == Role::Receive || target != Path::new(side::ALONG) {
                holdings.add("descriptor of", &target.to_string_lossy());
            }
        }
        for line in fs::read_to_string(format!("{of_process}/maps")).unwrap_or_default().lines() {
            if let Some(at) = line.find('/') {
                holdings.add("mapping of", &line[at..]);
            }
        }
        holdings
    }

    fn add(&mut self, what: &str, target: &str) {
        let (directory, name) = target.rsplit_once('/').unwrap_or(("", target));
        let mut kind = format!("{what} {directory}/");
        for (at, c) in name.char_indices() {
            match c.is_ascii_digit() && !name[..at].bytes().all(|before| before.is_ascii_digit()) {
                true if name[..at].ends_with(|before: char| before.is_ascii_digit()) => {}
                true => kind.push('#'),
                false => kind.push(c),
            }
        }
        *self.0.entry(kind).or_default() += 1;
    }
}

/// The kinds of which a survivor holds more and more. `holdings` has one entry for each death that it lived through.
///
/// A kind grows if the least of the last quarter exceeds the most of the first, so that what comes and goes does not count. From
/// none to one is no growth: a process opens some things once and late, such as the file that reports its peer's death, which a
/// receiver opens only when it finds its lane empty. A leak of such a kind shows with the second one.
pub fn grown(holdings: &[Holdings]) -> Option<Fault> {
    let quarter = holdings.len() / 4;
    if quarter < 2 {
        return None;
    }
    let (first, last) = (&holdings[..quarter], &holdings[holdings.len() - quarter..]);
    let count = |holdings: &Holdings, kind: &str| holdings.0.get(kind).copied().unwrap_or(0);
    let mut grown = Vec::new();
    for kind in last[0].0.keys() {
        let most_at_first = first.iter().map(|holdings| count(holdings, kind)).max().unwrap_or(0);
        let least_at_last = last.iter().map(|holdings| count(holdings, kind)).min().unwrap_or(0);
        if least_at_last > most_at_first.max(1) {
            grown.push(format!("{kind}: at first at most {most_at_first}, at last at least {least_at_last}"));
        }
    }
    let deaths = holdings.len();
    (!grown.is_empty())
        .then(|| Fault::new(Kind::Grown, 1, format!("a survivor of {deaths} deaths holds more: {}", grown.join("; "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holdings(counts: impl IntoIterator<Item = (&'static str, usize)>) -> Holdings {
        Holdings(counts.into_iter().map(|(kind, count)| (kind.to_owned(), count)).collect())
    }

    #[test]
    fn a_kind_that_stays_or_comes_and_goes_has_not_grown() {
        let steady = [1, 3, 1, 1, 3, 1, 2, 1].map(|count| holdings([("socket", count), ("eventfd", 2)]));
        assert_eq!(grown(&steady), None);
    }

    #[test]
    fn what_is_opened_once_and_late_has_not_grown() {
        let late = (0..16).map(|death| holdings([("life", usize::from(death > 8)), ("eventfd", 2)]));
        assert_eq!(grown(&late.collect::<Vec<_>>()), None);
    }

    #[test]
    fn a_kind_that_grows_is_found_however_slowly() {
        let steadily = (0..8).map(|death| holdings([("socket", 1 + death), ("eventfd", 2)]));
        assert!(grown(&steadily.collect::<Vec<_>>()).is_some());
        let once = (0..8).map(|death| holdings([("socket", 1 + usize::from(death > 3))]));
        assert!(grown(&once.collect::<Vec<_>>()).is_some());
        // A kind of which there was none leaks as soon as there are two that stay.
        let new = (0..16).map(|death| holdings([("life", death / 6)]));
        assert!(grown(&new.collect::<Vec<_>>()).is_some());
    }

    #[test]
    fn numbered_files_are_one_kind() {
        let logs = (0..8).map(|death| {
            let mut held = Holdings::default();
            (0..=death).for_each(|number| held.add("descriptor of", &format!("/tmp/log.{}", 9 + number)));
            held
        });
        assert!(grown(&logs.collect::<Vec<_>>()).is_some());
        let mut lane = Holdings::default();
        lane.add("descriptor of", "/tmp/c/12.life");
        assert!(lane.0.contains_key("descriptor of /tmp/c/12.life"));
    }

    #[test]
    fn a_process_holds_what_it_opens() {
        let file = fs::File::open("/dev/null").unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let held = Holdings::of(rustix::process::getpid(), Role::Receive).0;
        assert!(held["descriptor of /pipe:[#]"] >= 2 && held["descriptor of /dev/null"] >= 1, "{held:?}");
        assert!(held.keys().any(|kind| kind.starts_with("mapping of /")), "{held:?}");
        drop((file, reader, writer));
    }
}
