//! Records what operations would launch on a GPU, for tests on machines without one.

use std::cell::RefCell;

use super::Launch;
use crate::Result;

thread_local! {
    static RECORDED: RefCell<Option<Vec<Launch>>> = const { RefCell::new(None) };
}

/// Returns the launches of the operations that `call` runs in this thread. Its buffers are the CPU's, and no operation
/// reads or writes them.
pub(crate) fn record(call: impl FnOnce() -> Result<()>) -> Result<Vec<Launch>> {
    RECORDED.set(Some(Vec::new()));
    let called = call();
    let recorded = RECORDED.take().unwrap_or_default();
    called.map(|()| recorded)
}

/// Whether this thread records.
pub(crate) fn is_active() -> bool {
    RECORDED.with_borrow(Option::is_some)
}

/// Adds the launches of an operation.
pub(crate) fn add(launches: &[Launch]) {
    RECORDED.with_borrow_mut(|recorded| recorded.get_or_insert_default().extend_from_slice(launches));
}
