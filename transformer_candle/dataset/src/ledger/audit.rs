//! Whether a ledger's steps used every row of every finished epoch exactly once, and took of each component its share.

mod component;

use std::path::Path;

use self::component::ComponentAuditor;
pub use self::component::{AuditedComponent, AuditedEpoch};
use super::{BeginRecord, LedgerHead, LedgerRecord, StepRecord, WindowRecord, for_each_record};
use crate::mixture_schedule::Shares;
use crate::{DataError, DataSource, Mixture, StreamSettings};

/// What an audit found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    /// Steps in the ledger.
    pub steps: u64,
    /// Targets that they were trained on.
    pub targets: u64,
    /// What they took of each component.
    pub components: Vec<AuditedComponent>,
    /// What does not fit, in words; empty where all is well.
    pub problems: Vec<String>,
}

/// At most so many problems are put into words.
const MOST_PROBLEMS: usize = 20;

/// What does not fit.
#[derive(Default)]
struct Problems(Vec<String>);

/// Follows the chain to `head` and checks that steps follow each other without a gap and take of each component its
/// share, that no row was read twice in an epoch, and that no document of a finished epoch was left out. `ended` says
/// that the data had ended after the last step.
///
/// Holds a few numbers for each group read in an epoch, and reads the footers of all files for a finished one.
///
/// # Errors
/// [`DataError::Ledger`] where the chain does not hold; [`DataError`] where the data cannot be read.
pub fn audit(
    path: &Path,
    head: &LedgerHead,
    data: impl Into<Mixture>,
    settings: &StreamSettings,
    ended: bool,
) -> Result<Audit, DataError> {
    let mixture: Mixture = data.into();
    let selection = |source: &DataSource| source.selection(settings.wanted(), source.cancel());
    let selections = mixture.sources().iter().map(selection).collect::<Result<Vec<_>, _>>()?;
    let components = mixture.sources().iter().zip(&selections);
    let mut auditor = Auditor {
        shares: mixture.shares(),
        components: components.map(|(source, selection)| ComponentAuditor::new(source, selection)).collect(),
        given: vec![0; selections.len()],
        steps: 0,
        targets: 0,
        next_step: None,
        problems: Problems::default(),
    };
    for_each_record(path, head, mixture.cancel(), |record| match record {
        LedgerRecord::Begin(begin) => {
            auditor.begin(&begin);
            Ok(())
        }
        LedgerRecord::Window(window) => auditor.window(&window),
        LedgerRecord::Step(step) => {
            auditor.step(&step);
            Ok(())
        }
    })?;
    auditor.finish(ended)
}

struct Auditor<'a> {
    shares: &'a Shares,
    components: Vec<ComponentAuditor<'a>>,
    /// Sequences taken of each component, since the run began.
    given: Vec<u64>,
    steps: u64,
    targets: u64,
    /// None before the first line.
    next_step: Option<u64>,
    problems: Problems,
}

impl Problems {
    fn note(&mut self, problem: impl FnOnce() -> String) {
        if self.0.len() < MOST_PROBLEMS {
            self.0.push(problem());
        }
    }
}

impl Auditor<'_> {
    fn begin(&mut self, begin: &BeginRecord) {
        if self.next_step.is_some() {
            self.problems.note(|| "the ledger begins a second time".to_owned());
        }
        self.next_step = Some(begin.step + 1);
        for ((component, given), begin) in self.components.iter_mut().zip(&mut self.given).zip(&begin.components) {
            component.begin(begin);
            *given = begin.given;
        }
    }

    fn window(&mut self, window: &WindowRecord) -> Result<(), DataError> {
        self.next_step.get_or_insert(1);
        match self.components.get_mut(window.component as usize) {
            Some(component) => component.window(window, &mut self.problems)?,
            None => self.problems.note(|| format!("a window is of component {}, which there is not", window.component)),
        }
        Ok(())
    }

    fn step(&mut self, record: &StepRecord) {
        let step = record.step;
        self.steps += 1;
        self.targets += record.targets;
        if self.next_step.is_some_and(|next| next != step) {
            self.problems.note(|| format!("step {step} does not follow the step before"));
        }
        self.next_step = Some(step + 1);
        for taken in &record.taken {
            let component = self.components.get_mut(taken.component as usize);
            if !component.is_some_and(|component| component.take(taken)) {
                let name = self.components.get(taken.component as usize).map_or("no component", |it| &it.audited.name);
                self.problems.note(|| {
                    format!(
                        "step {step} starts at sequence {} of window {} of epoch {} of {name}, not where the step before ended",
                        taken.sequence, taken.window, taken.epoch
                    )
                });
                continue;
            }
            self.given[taken.component as usize] += taken.sequences;
        }
        if !self.shares.lead_to(&self.given) {
            self.problems
                .note(|| format!("after step {step} the components have not had their shares of the sequences"));
        }
    }

    /// Judges the epochs that are begun. The data end where the component whose turn it is has ended.
    fn finish(mut self, ended: bool) -> Result<Audit, DataError> {
        let last = ended.then(|| self.shares.next(&self.given));
        for (index, component) in self.components.iter_mut().enumerate() {
            component.finish_epoch(last == Some(index), &mut self.problems)?;
        }
        Ok(Audit {
            steps: self.steps,
            targets: self.targets,
            components: self.components.into_iter().map(|component| component.audited).collect(),
            problems: self.problems.0,
        })
    }
}
