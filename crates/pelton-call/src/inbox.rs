//! Completions that came while their caller did something else, stored by call. It only stores: it neither waits nor
//! reads a lane. A blocking client takes from it before it waits; an event loop stores what a client receives and wakes
//! the task that [`Inbox::store`] returns.

use super::calls::{CallId, Outcome};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::task::Waker;

/// A completion in this process's own memory.
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

impl std::fmt::Debug for StoredCompletion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoredCompletion")
            .field("call", &self.call)
            .field("outcome", &self.outcome)
            .field("bytes", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

/// Completions in the order in which they came, in all and of each call, with the tasks that wait for them. Each
/// function takes constant time: the nodes are in two lists, of all and of their call.
#[derive(Debug)]
pub struct Inbox {
    nodes: Vec<Node>,
    /// Indices of the nodes that store nothing.
    free: Vec<usize>,
    /// The oldest and the newest of all.
    first: usize,
    last: usize,
    calls: HashMap<CallId, Queue>,
    bytes: u64,
    part_bytes: u64,
    finals: usize,
}

#[derive(Debug)]
struct Node {
    /// `None` of a free node.
    completion: Option<StoredCompletion>,
    before: usize,
    after: usize,
    /// The next one of the same call.
    after_of_call: usize,
}

/// The stored completions of a call, and the task that waits for it.
#[derive(Debug)]
struct Queue {
    first: usize,
    last: usize,
    waker: Option<Waker>,
}

/// The index of no node.
const NONE: usize = usize::MAX;

impl Default for Queue {
    fn default() -> Queue {
        Queue { first: NONE, last: NONE, waker: None }
    }
}

impl Default for Inbox {
    fn default() -> Inbox {
        Inbox {
            nodes: Vec::new(),
            free: Vec::new(),
            first: NONE,
            last: NONE,
            calls: HashMap::new(),
            bytes: 0,
            part_bytes: 0,
            finals: 0,
        }
    }
}

impl Inbox {
    /// Whether nothing is stored.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.first == NONE
    }

    /// Number of stored completions.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
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
        let (before, index) = (self.last, self.insert(completion, self.last, NONE));
        match before {
            NONE => self.first = index,
            before => self.nodes[before].after = index,
        }
        self.last = index;
        let queue = self.calls.entry(call).or_default();
        match queue.last {
            NONE => queue.first = index,
            last => self.nodes[last].after_of_call = index,
        }
        queue.last = index;
        queue.waker.as_ref()
    }

    /// Stores a completion before all others: it was taken first.
    pub(crate) fn store_first(&mut self, completion: StoredCompletion) {
        let call = completion.call;
        let (after, index) = (self.first, self.insert(completion, NONE, self.first));
        match after {
            NONE => self.last = index,
            after => self.nodes[after].before = index,
        }
        self.first = index;
        let queue = self.calls.entry(call).or_default();
        self.nodes[index].after_of_call = queue.first;
        if queue.first == NONE {
            queue.last = index;
        }
        queue.first = index;
    }

    fn insert(&mut self, completion: StoredCompletion, before: usize, after: usize) -> usize {
        self.bytes += completion.cost();
        match completion.outcome.is_final() {
            true => self.finals += 1,
            false => self.part_bytes += completion.cost(),
        }
        let node = Node { completion: Some(completion), before, after, after_of_call: NONE };
        match self.free.pop() {
            Some(index) => {
                self.nodes[index] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    /// Takes the oldest completion.
    pub(crate) fn take_first(&mut self) -> Option<StoredCompletion> {
        let call = self.nodes.get(self.first)?.completion.as_ref()?.call;
        self.take_of(call)
    }

    /// Takes the oldest completion of a call.
    pub fn take_of(&mut self, call: CallId) -> Option<StoredCompletion> {
        let Entry::Occupied(mut entry) = self.calls.entry(call) else { return None };
        let queue = entry.get_mut();
        let index = queue.first;
        let node = self.nodes.get_mut(index)?;
        let completion = node.completion.take()?;
        let (before, after) = (node.before, node.after);
        queue.first = node.after_of_call;
        if queue.first == NONE {
            queue.last = NONE;
            if completion.outcome.is_final() || queue.waker.is_none() {
                entry.remove();
            }
        }
        match before {
            NONE => self.first = after,
            before => self.nodes[before].after = after,
        }
        match after {
            NONE => self.last = before,
            after => self.nodes[after].before = before,
        }
        self.free.push(index);
        self.bytes -= completion.cost();
        match completion.outcome.is_final() {
            true => self.finals -= 1,
            false => self.part_bytes -= completion.cost(),
        }
        Some(completion)
    }

    /// Has [`Inbox::store`] return this task for completions of that call, until one that ends the call is taken.
    pub fn wait_for(&mut self, call: CallId, task: &Waker) {
        match &mut self.calls.entry(call).or_default().waker {
            Some(waker) => waker.clone_from(task),
            waker => *waker = Some(task.clone()),
        }
    }

    /// Drops all completions of a call, and its task. Returns how many completions there were.
    pub fn forget(&mut self, call: CallId) -> usize {
        let before = self.len();
        while self.take_of(call).is_some() {}
        self.calls.remove(&call);
        before - self.len()
    }

    /// Wakes all tasks: each is to find an error by itself.
    pub fn wake_all(&self) {
        self.calls.values().filter_map(|queue| queue.waker.as_ref()).for_each(Waker::wake_by_ref);
    }
}
