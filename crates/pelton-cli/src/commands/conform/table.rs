//! The results: Markdown tables of the pairs and of what each language lacks, and every check as JSON.

use super::{Check, Lacks, exchange::Implementation, exchange::Outcome};
use serde_json::json;
use std::fmt::Write as _;

/// The letters of a cell, in this order.
const LETTERS: [(char, &str); 11] = [
    ('m', "messages by a socket"),
    ('d', "killed sender"),
    ('r', "killed receiver"),
    ('t', "traceparents"),
    ('M', "messages by a path"),
    ('D', "killed sender by path"),
    ('R', "killed receiver by path"),
    ('T', "traceparents by a path"),
    ('c', "calls"),
    ('s', "replies in parts"),
    ('f', "record files"),
];

pub struct Summary<'a> {
    pub languages: &'a [Implementation],
    pub checks: &'a [Check<'a>],
    pub lacks: &'a Lacks,
    pub seconds: f64,
}

/// How many checks passed, failed, and were not supported.
pub fn counts(checks: &[Check<'_>]) -> String {
    let failed = checks.iter().filter(|check| check.has_failed()).count();
    let unsupported = checks.iter().filter(|check| check.is_unsupported()).count();
    format!("{} passed, {failed} failed, {unsupported} unsupported", checks.len() - failed - unsupported)
}

impl Summary<'_> {
    /// The letters of these checks, and what they mean.
    fn letters(&self) -> impl Iterator<Item = (char, &str)> {
        LETTERS.into_iter().filter(|(letter, _)| self.checks.iter().any(|check| check.case.letter == *letter))
    }

    /// The letter of each kind of check that passed; `-` if a language lacks it, `!` if it failed.
    fn cell(&self, languages: [usize; 2]) -> String {
        let of_letter = |letter: char| {
            let checks = self.checks.iter().filter(|check| check.case.letter == letter && check.languages == languages);
            match () {
                () if checks.clone().any(Check::has_failed) => '!',
                () if checks.clone().any(Check::is_unsupported) => '-',
                () => letter,
            }
        };
        self.letters().map(|(letter, _)| of_letter(letter)).collect()
    }

    /// How many vectors a language passed, with `!` if it failed others.
    fn vectors(&self, language: usize) -> String {
        let checks = self.checks.iter().filter(|check| check.case.letter == 'v' && check.languages[0] == language);
        let passed = checks.clone().filter(|check| check.outcome == Outcome::Passed).count();
        match (passed, checks.clone().any(Check::has_failed)) {
            (0, false) => "-".to_owned(),
            (passed, has_failed) => format!("{passed}{}", if has_failed { "!" } else { "" }),
        }
    }

    /// The cells, with the names of the rows and columns.
    fn rows(&self) -> Vec<Vec<String>> {
        let names = || self.languages.iter().map(|language| language.name.clone());
        let mut rows = vec![std::iter::once("from \\ to".to_owned()).chain(names()).collect::<Vec<_>>()];
        for (from, name) in names().enumerate() {
            let cells = (0..self.languages.len()).map(|to| self.cell([from, to]));
            rows.push(std::iter::once(name).chain(cells).collect());
        }
        if self.checks.iter().any(|check| check.case.letter == 'v') {
            rows[0].push("vectors".to_owned());
            (1..rows.len()).for_each(|at| rows[at].push(self.vectors(at - 1)));
        }
        rows
    }

    /// What the letters mean, three to a line.
    fn legend(&self) -> String {
        let letters = self.letters().map(|(letter, name)| format!("`{letter}` {name}, "));
        let texts: Vec<String> = letters.chain(["`-` unsupported, `!` failed.".to_owned()]).collect();
        texts.chunks(3).map(|texts| format!("{}\n", texts.concat().trim_end())).collect()
    }

    /// For a document, and for a terminal.
    pub fn markdown(&self) -> String {
        let mut text = table(&self.rows());
        let _ = writeln!(
            text,
            "\nA row sends or calls, a column receives or serves:\n{}{} checks: {}.",
            self.legend(),
            self.checks.len(),
            counts(self.checks)
        );
        let mut rows = vec![["language", "lacks", "reason"].map(str::to_owned).to_vec()];
        for ((language, feature), reason) in self.lacks {
            rows.push(vec![language.clone(), format!("`{feature}`"), reason.clone()]);
        }
        if rows.len() > 1 {
            text += &format!("\n{}", table(&rows));
        }
        text
    }

    /// Every check.
    pub fn json(&self) -> String {
        let name = |at: usize| self.languages[at].name.as_str();
        let languages = self.languages.iter().enumerate().map(|(at, language)| {
            let lacks = self.lacks.iter().filter(|((of, _), _)| of == name(at));
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
            json!({ "check": check.case.claim, "from": from, "to": to, "result": result, "text": text, "seconds": check.seconds })
        });
        let (languages, checks): (Vec<_>, Vec<_>) = (languages.collect(), checks.collect());
        format!("{}\n", json!({ "languages": languages, "checks": checks, "seconds": self.seconds }))
    }
}

/// A Markdown table, in columns also as plain text.
fn table(rows: &[Vec<String>]) -> String {
    let column = |at: usize| rows.iter().map(move |row| row[at].chars().count());
    let widths: Vec<usize> = (0..rows[0].len()).map(|at| column(at).max().unwrap_or(0)).collect();
    let mut lines: Vec<String> = rows
        .iter()
        .map(|row| {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("| {cell:width$} "));
            cells.collect::<String>() + "|\n"
        })
        .collect();
    lines.insert(1, widths.iter().map(|&width| format!("|{:-<1$}", "", width + 2)).collect::<String>() + "|\n");
    lines.concat()
}
