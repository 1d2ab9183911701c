//! Completions that came while their caller did something else, stored by call. It only stores: it neither waits nor
//! reads a lane. A blocking client takes from it before it waits; an event loop stores what a client receives and wakes
//! the task that [`Inbox::store`] returns.

use super::calls::{CallId, Outcome};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::task::Waker;

/// A completion in this process's own memory.
#[derive(Debug)]
pub struct StoredCompletion {
    /// Its call.
    pub call: CallId,
    /// What it means.
    pub outcome: Outcome,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

impl StoredCompletion {
    /// Its memory, also when it has no bytes.
    fn cost(&self) -> u64 {
        (self.bytes.len() + size_of::<StoredCompletion>()) as u64
    }
}

/// Completions in the order in which they came, in all and of each call, with the tasks that wait for them.
#[derive(Debug, Default)]
pub struct Inbox {
    /// By a number that grows.
    stored: BTreeMap<i64, StoredCompletion>,
    /// The numbers of each call that has any.
    by_call: HashMap<CallId, VecDeque<i64>>,
    wakers: HashMap<CallId, Waker>,
    bytes: u64,
    part_bytes: u64,
    finals: usize,
}

impl Inbox {
    /// Whether nothing is stored.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.stored.is_empty()
    }

    /// Number of stored completions.
    pub fn len(&self) -> usize {
        self.stored.len()
    }

    /// The memory of all stored completions.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The memory of those that are parts.
    pub(crate) fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    /// Number of those that end their calls.
    pub(crate) fn finals(&self) -> usize {
        self.finals
    }

    /// Stores a completion. Returns the task that waits for its call.
    pub fn store(&mut self, completion: StoredCompletion) -> Option<&Waker> {
        let call = completion.call;
        let number = self.stored.last_key_value().map_or(0, |(last, _)| last + 1);
        self.by_call.entry(call).or_default().push_back(number);
        self.insert(number, completion);
        self.wakers.get(&call)
    }

    /// Stores a completion before all others: it was taken first.
    pub(crate) fn store_first(&mut self, completion: StoredCompletion) {
        let number = self.stored.first_key_value().map_or(0, |(first, _)| first - 1);
        self.by_call.entry(completion.call).or_default().push_front(number);
        self.insert(number, completion);
    }

    fn insert(&mut self, number: i64, completion: StoredCompletion) {
        self.bytes += completion.cost();
        match completion.outcome.is_final() {
            true => self.finals += 1,
            false => self.part_bytes += completion.cost(),
        }
        self.stored.insert(number, completion);
    }

    /// Takes the oldest completion.
    pub(crate) fn take_first(&mut self) -> Option<StoredCompletion> {
        let call = self.stored.first_key_value()?.1.call;
        self.take_of(call)
    }

    /// Takes the oldest completion of a call.
    pub fn take_of(&mut self, call: CallId) -> Option<StoredCompletion> {
        let numbers = self.by_call.get_mut(&call)?;
        let number = numbers.pop_front()?;
        if numbers.is_empty() {
            self.by_call.remove(&call);
        }
        let completion = self.stored.remove(&number)?;
        self.bytes -= completion.cost();
        match completion.outcome.is_final() {
            true => {
                self.finals -= 1;
                self.wakers.remove(&call);
            }
            false => self.part_bytes -= completion.cost(),
        }
        Some(completion)
    }

    /// Has [`Inbox::store`] return this task for completions of that call, until one ends the call.
    pub fn wait_for(&mut self, call: CallId, task: &Waker) {
        match self.wakers.get_mut(&call) {
            Some(waker) => waker.clone_from(task),
            None => drop(self.wakers.insert(call, task.clone())),
        }
    }

    /// Drops all completions of a call, and its task. Returns how many completions there were.
    pub fn forget(&mut self, call: CallId) -> usize {
        let before = self.len();
        while self.take_of(call).is_some() {}
        self.wakers.remove(&call);
        before - self.len()
    }

    /// Wakes all tasks: each is to find an error by itself.
    pub fn wake_all(&self) {
        self.wakers.values().for_each(Waker::wake_by_ref);
    }
}
