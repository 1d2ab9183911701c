//! The results: a table of the pairs, what each language lacks, and every check as JSON.

use super::{Case, Check, Lacks, exchange::Implementation, exchange::Outcome};
use serde_json::json;
use std::{fmt::Write as _, time::Duration};

/// The letters of a cell, in this order.
const LETTERS: [(char, &str); 9] = [
    ('m', "messages by a socket"),
    ('d', "killed sender"),
    ('r', "killed receiver"),
    ('M', "messages by a path"),
    ('D', "killed sender by path"),
    ('R', "killed receiver by path"),
    ('c', "calls"),
    ('s', "replies in parts"),
    ('f', "record files"),
];

pub struct Summary<'a> {
    languages: &'a [Implementation],
    checks: &'a [Check],
    lacks: &'a Lacks,
    letters: Vec<(char, &'static str)>,
    seconds: f64,
}

/// How many checks passed, failed, and were not supported.
pub fn counts<'a>(checks: impl Iterator<Item = &'a Check>) -> String {
    let [mut passed, mut failed, mut unsupported] = [0; 3];
    for check in checks {
        *match check.outcome {
            Outcome::Passed => &mut passed,
            Outcome::Failed(_) => &mut failed,
            Outcome::Unsupported(_) => &mut unsupported,
        } += 1;
    }
    format!("{passed} passed, {failed} failed, {unsupported} unsupported")
}

impl<'a> Summary<'a> {
    pub fn new(
        languages: &'a [Implementation],
        checks: &'a [Check],
        lacks: &'a Lacks,
        cases: &[Case],
        time: Duration,
    ) -> Summary<'a> {
        let letters = LETTERS.into_iter().filter(|(letter, _)| cases.iter().any(|case| case.letter == *letter));
        Summary { languages, checks, lacks, letters: letters.collect(), seconds: time.as_secs_f64() }
    }

    pub fn failed(&self) -> usize {
        self.checks.iter().filter(|check| matches!(check.outcome, Outcome::Failed(_))).count()
    }

    /// The letter of each kind of check that passed; `-` if a language lacks it, `!` if it failed.
    fn cell(&self, languages: [usize; 2]) -> String {
        let of_letter = |letter: char| {
            let checks = self.checks.iter().filter(move |check| check.letter == letter && check.languages == languages);
            checks.fold(letter, |found, check| match (&check.outcome, found) {
                (Outcome::Failed(_), _) | (_, '!') => '!',
                (Outcome::Unsupported(_), _) => '-',
                (Outcome::Passed, found) => found,
            })
        };
        self.letters.iter().map(|(letter, _)| of_letter(*letter)).collect()
    }

    /// How many vectors a language passed, with `!` if it failed others.
    fn vectors(&self, language: usize) -> String {
        let checks = self.checks.iter().filter(|check| check.letter == 'v' && check.languages[0] == language);
        let passed = checks.clone().filter(|check| check.outcome == Outcome::Passed).count();
        let has_failed = checks.clone().any(|check| matches!(check.outcome, Outcome::Failed(_)));
        if passed == 0 && !has_failed {
            "-".to_owned()
        } else {
            format!("{passed}{}", if has_failed { "!" } else { "" })
        }
    }

    /// The cells, with the names of the rows and columns. `corner` is above the rows' names.
    fn rows(&self, corner: &str) -> Vec<Vec<String>> {
        let names = self.languages.iter().map(|language| language.name.clone());
        let mut rows = vec![std::iter::once(corner.to_owned()).chain(names.clone()).collect::<Vec<_>>()];
        for (from, name) in names.enumerate() {
            let cells = (0..self.languages.len()).map(|to| self.cell([from, to]));
            rows.push(std::iter::once(name).chain(cells).collect());
        }
        if self.checks.iter().any(|check| check.letter == 'v') {
            rows[0].push("vectors".to_owned());
            (1..rows.len()).for_each(|at| rows[at].push(self.vectors(at - 1)));
        }
        rows
    }

    /// What the letters mean, three to a line.
    fn legend(&self) -> String {
        let letters = self.letters.iter().map(|(letter, name)| format!("`{letter}` {name}, "));
        let texts: Vec<String> = letters.chain(["`-` unsupported, `!` failed.".to_owned()]).collect();
        texts.chunks(3).map(|texts| format!("{}\n", texts.concat().trim_end())).collect()
    }

    /// For a terminal.
    pub fn text(&self) -> String {
        let rows = self.rows("from \\ to");
        let widths: Vec<usize> =
            (0..rows[0].len()).map(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0)).collect();
        let mut text = String::new();
        for row in &rows {
            let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
            let _ = writeln!(text, "{}", cells.join(" ").trim_end());
        }
        text += &self.legend();
        for ((language, feature), reason) in self.lacks.lock().iter() {
            let _ = writeln!(text, "unsupported: {language} `{feature}`: {reason}");
        }
        let _ = writeln!(text, "{} checks in {:.0} s: {}", self.checks.len(), self.seconds, counts(self.checks.iter()));
        text
    }

    /// The table of pairs and what each language lacks, for a document.
    pub fn markdown(&self) -> String {
        let mut rows = self.rows("sends or calls \\ receives or serves").into_iter();
        let header = rows.next().unwrap_or_default();
        let mut text = format!("| {} |\n|{}\n", header.join(" | "), "---|".repeat(header.len()));
        rows.for_each(|row| text += &format!("| {} |\n", row.join(" | ")));
        let _ = writeln!(text, "\n{}Of {} checks {}.", self.legend(), self.checks.len(), counts(self.checks.iter()));
        let _ = writeln!(text, "\n| language | lacks | reason |\n|---|---|---|");
        for ((language, feature), reason) in self.lacks.lock().iter() {
            let _ = writeln!(text, "| {language} | `{feature}` | {reason} |");
        }
        text
    }

    /// Every check.
    pub fn json(&self) -> String {
        let name = |at: usize| self.languages[at].name.as_str();
        let languages = self.languages.iter().enumerate().map(|(at, language)| {
            let lacks = self.lacks.lock();
            let lacks = lacks.iter().filter(|((of, _), _)| of == name(at));
            let lacks: Vec<_> = lacks.map(|((_, what), reason)| json!({ "feature": what, "reason": reason })).collect();
            json!({ "name": name(at), "program": language.program, "lacks": lacks })
        });
        let checks = self.checks.iter().map(|check| {
            let (result, text) = match &check.outcome {
                Outcome::Passed => ("passed", None),
                Outcome::Failed(text) => ("failed", Some(text)),
                Outcome::Unsupported(text) => ("unsupported", Some(text)),
            };
            let [from, to] = check.languages.map(name);
            json!({ "check": check.claim, "from": from, "to": to, "result": result, "text": text, "seconds": check.seconds })
        });
        let (languages, checks): (Vec<_>, Vec<_>) = (languages.collect(), checks.collect());
        format!("{}\n", json!({ "languages": languages, "checks": checks, "seconds": self.seconds }))
    }
}
