//! Descriptors and mappings of a survivor, and whether they grow with the deaths that it outlives.

use super::{
    ledger::{Fault, FaultKind},
    side,
};
use rustix::process::Pid;
use std::{collections::BTreeMap, fs, path::Path};

/// Open descriptors and file mappings of a process: a count per kind. A kind is the path of the file, with `#` for a
/// number in its name. An object without a path has a name from the kernel (`socket:[#]`). The number at the start of
/// the name of a lane's file stays: each lane's files may be opened late.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources(BTreeMap<String, usize>);

impl Resources {
    /// Reads them from /proc. Descriptors that were sent along with messages do not count: both sides keep them for the
    /// messages in flight. Each side checks that none is left once everything is released.
    pub fn of(pid: Pid) -> Resources {
        let of_process = format!("/proc/{}", pid.as_raw_nonzero());
        let mut resources = Resources::default();
        for entry in fs::read_dir(format!("{of_process}/fd")).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            if target != Path::new(side::SENT_FILE) {
                resources.add("descriptor of", &target.to_string_lossy());
            }
        }
        for line in fs::read_to_string(format!("{of_process}/maps")).unwrap_or_default().lines() {
            if let Some(at) = line.find('/') {
                resources.add("mapping of", &line[at..]);
            }
        }
        resources
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

/// A fault if a kind grows. `holdings` has one entry for each outlived death.
///
/// A kind grows if the minimum of the last quarter exceeds the maximum of the first, so short-lived objects do not
/// count. From none to one is no growth: a process opens some files once and late. For example, a receiver opens the
/// file that proves its peer's death only when its lane is empty. A leak of such a kind shows with the second one.
pub fn growth(resources: &[Resources]) -> Option<Fault> {
    let quarter = resources.len() / 4;
    if quarter < 2 {
        return None;
    }
    let (first, last) = (&resources[..quarter], &resources[resources.len() - quarter..]);
    let count = |resources: &Resources, kind: &str| resources.0.get(kind).copied().unwrap_or(0);
    let mut growth = Vec::new();
    for kind in last[0].0.keys() {
        let most_at_first = first.iter().map(|resources| count(resources, kind)).max().unwrap_or(0);
        let least_at_last = last.iter().map(|resources| count(resources, kind)).min().unwrap_or(0);
        if least_at_last > most_at_first.max(1) {
            growth.push(format!(
                "{kind}: at most {most_at_first} in the first quarter, at least {least_at_last} in the last"
            ));
        }
    }
    let deaths = resources.len();
    (!growth.is_empty()).then(|| {
        Fault::new(
            FaultKind::Grown,
            1,
            format!("a survivor of {deaths} deaths has more and more: {}", growth.join("; ")),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resources(counts: impl IntoIterator<Item = (&'static str, usize)>) -> Resources {
        Resources(counts.into_iter().map(|(kind, count)| (kind.to_owned(), count)).collect())
    }

    #[test]
    fn a_steady_or_fluctuating_kind_has_not_grown() {
        let steady = [1, 3, 1, 1, 3, 1, 2, 1].map(|count| resources([("socket", count), ("eventfd", 2)]));
        assert_eq!(growth(&steady), None);
    }

    #[test]
    fn a_file_opened_once_and_late_has_not_grown() {
        let late = (0..16).map(|death| resources([("life", usize::from(death > 8)), ("eventfd", 2)]));
        assert_eq!(growth(&late.collect::<Vec<_>>()), None);
    }

    #[test]
    fn a_growing_kind_is_found_at_any_speed() {
        let steadily = (0..8).map(|death| resources([("socket", 1 + death), ("eventfd", 2)]));
        assert!(growth(&steadily.collect::<Vec<_>>()).is_some());
        let once = (0..8).map(|death| resources([("socket", 1 + usize::from(death > 3))]));
        assert!(growth(&once.collect::<Vec<_>>()).is_some());
        // A new kind grows once two of it stay.
        let new = (0..16).map(|death| resources([("life", death / 6)]));
        assert!(growth(&new.collect::<Vec<_>>()).is_some());
    }

    #[test]
    fn numbered_files_are_one_kind() {
        let logs = (0..8).map(|death| {
            let mut held = Resources::default();
            (0..=death).for_each(|number| held.add("descriptor of", &format!("/tmp/log.{}", 9 + number)));
            held
        });
        assert!(growth(&logs.collect::<Vec<_>>()).is_some());
        let mut lane = Resources::default();
        lane.add("descriptor of", "/tmp/c/12.life");
        assert!(lane.0.contains_key("descriptor of /tmp/c/12.life"));
    }

    #[test]
    fn an_open_file_is_among_the_resources() {
        let file = fs::File::open("/dev/null").unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let held = Resources::of(rustix::process::getpid()).0;
        assert!(held["descriptor of /pipe:[#]"] >= 2 && held["descriptor of /dev/null"] >= 1, "{held:?}");
        assert!(held.keys().any(|kind| kind.starts_with("mapping of /")), "{held:?}");
        drop((file, reader, writer));
    }
}
