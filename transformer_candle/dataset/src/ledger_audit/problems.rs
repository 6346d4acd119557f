//! The violations that an audit finds.

/// Problems that are reported at most.
const MAX_PROBLEMS: usize = 20;

/// The first violations, in words.
#[derive(Default)]
pub(super) struct Problems(pub(super) Vec<String>);

impl Problems {
    pub(super) fn note(&mut self, problem: impl FnOnce() -> String) {
        if self.0.len() < MAX_PROBLEMS {
            self.0.push(problem());
        }
    }
}
