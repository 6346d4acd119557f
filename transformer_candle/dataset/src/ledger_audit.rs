//! Audit: checks that the steps of a ledger used every row of every finished epoch exactly once, and sequences of each
//! component in proportion to its mixture weight.

mod component;

use std::path::Path;

use self::component::ComponentAuditor;
pub use self::component::{AuditedComponent, AuditedEpoch};
use crate::ledger::{
    BeginRecord, CorruptedRecord, LedgerHead, LedgerRecord, SequenceRange, StageRecord, StepRecord, WindowRecord,
    for_each_record,
};
use crate::{DataError, DataSource, StreamStage};

/// Problems that are reported at most.
const MAX_PROBLEMS: usize = 20;

/// The first violations, in words.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn note(&mut self, problem: impl FnOnce() -> String) {
        if self.0.len() < MAX_PROBLEMS {
            self.0.push(problem());
        }
    }
}

/// The result of an audit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    /// Steps in the ledger.
    pub steps: u64,
    /// Target tokens of these steps.
    pub targets: u64,
    /// The sequences and epochs of each component.
    pub components: Vec<AuditedComponent>,
    /// Sequences that the steps of each stage consumed.
    pub stage_sequences: Vec<u64>,
    /// The violations found, in words; empty if there are none.
    pub problems: Vec<String>,
}

/// Verifies the hash chain up to `head` and checks that steps follow each other without a gap and take sequences of the
/// components in the order of the mixture schedule, that no row was read twice in an epoch, and that no document of a
/// finished epoch was left out, other than those whose sequences a stage leaves out. `stages` are those of the run, at least
/// one. `is_exhausted` says that the data had ended after the last step.
///
/// Holds a few numbers for each row group read in an epoch, and reads the footers of all shards for a finished one.
///
/// # Errors
/// [`DataError::Ledger`] where the chain does not hold; [`DataError`] where the data cannot be read.
pub fn audit(path: &Path, head: &LedgerHead, stages: &[StreamStage], is_exhausted: bool) -> Result<Audit, DataError> {
    // The held-out rows are the same in all stages.
    let StreamStage { mixture, settings } = &stages[0];
    let split = |source: &DataSource| source.held_out_split(settings.split_settings());
    let splits = mixture.sources().iter().map(split).collect::<Result<Vec<_>, _>>()?;
    let components = mixture.sources().iter().zip(&splits);
    let mut auditor = Auditor {
        stages,
        components: components.map(|(source, split)| ComponentAuditor::new(source, split)).collect(),
        delivered: vec![0; splits.len()],
        stage: 0,
        stage_sequences: vec![0; stages.len()],
        steps: 0,
        targets: 0,
        next_step: None,
        problems: Problems::default(),
    };
    for_each_record(path, head, mixture.cancel(), |record| {
        match record {
            LedgerRecord::Begin(begin) => auditor.begin(&begin),
            LedgerRecord::Window(window) => auditor.window(&window)?,
            LedgerRecord::Files(record) => {
                if let Some(component) = auditor.components.get_mut(record.component as usize) {
                    component.files(record);
                }
            }
            LedgerRecord::Corrupted(record) => auditor.corrupted(&record),
            LedgerRecord::Step(step) => auditor.step(&step),
            LedgerRecord::Stage(stage) => auditor.stage(&stage),
        }
        Ok(())
    })?;
    auditor.finish(is_exhausted)
}

struct Auditor<'a> {
    stages: &'a [StreamStage],
    components: Vec<ComponentAuditor<'a>>,
    /// Sequences delivered of each component since the start of the stage.
    delivered: Vec<u64>,
    /// Index of the current stage.
    stage: usize,
    stage_sequences: Vec<u64>,
    steps: u64,
    targets: u64,
    /// The step that must come next; `None` before the first line.
    next_step: Option<u64>,
    problems: Problems,
}

impl<'a> Auditor<'a> {
    fn begin(&mut self, begin: &BeginRecord) {
        if self.next_step.is_some() {
            self.problems.note(|| "the ledger has a second first line".to_owned());
        }
        self.next_step = Some(begin.step + 1);
        self.enter(begin.stage);
        let delivered = self.components.iter_mut().zip(&mut self.delivered);
        for ((component, delivered), begin) in delivered.zip(&begin.components) {
            component.begin(begin);
            *delivered = begin.delivered;
        }
    }

    fn window(&mut self, window: &WindowRecord) -> Result<(), DataError> {
        self.next_step.get_or_insert(1);
        match self.components.get_mut(window.component as usize) {
            Some(component) => component.window(window, &mut self.problems)?,
            None => {
                self.problems.note(|| format!("a window is of component {}, which does not exist", window.component));
            }
        }
        Ok(())
    }

    fn corrupted(&mut self, record: &CorruptedRecord) {
        self.next_step.get_or_insert(1);
        if let Some(component) = self.components.get_mut(record.component as usize) {
            component.corrupted(&record.found);
        } else {
            let component = record.component;
            self.problems.note(|| format!("corrupted rows are of component {component}, which does not exist"));
        }
    }

    fn step(&mut self, record: &StepRecord) {
        let step = record.step;
        self.steps += 1;
        self.targets += record.targets;
        if self.next_step.is_some_and(|next| next != step) {
            self.problems.note(|| format!("step {step} does not follow the previous step"));
        }
        self.next_step = Some(step + 1);
        for range in &record.sequence_ranges {
            if self.advance(range, &format!("step {step}"), ComponentAuditor::take) {
                self.delivered[range.component as usize] += range.sequences;
                self.stage_sequences[self.stage] += range.sequences;
            }
        }
        if !self.stages[self.stage].mixture.schedule().is_reachable(&self.delivered) {
            self.problems.note(|| {
                format!("after step {step} the sequences of the components do not match their mixture weights")
            });
        }
    }

    /// Enters a stage, whose record must list the rest of the windows in use as left out.
    fn stage(&mut self, record: &StageRecord) {
        let StageRecord { stage, step, left_out } = record;
        if self.next_step.is_some_and(|next| next != *step) {
            self.problems
                .note(|| format!("stage {stage} begins with step {step}, which does not follow the previous step"));
        }
        for range in left_out {
            self.advance(range, &format!("what stage {stage} leaves out"), ComponentAuditor::leave_out);
        }
        if let Some(component) = self.components.iter().find(|component| component.is_in_window()) {
            let name = &component.audited.name;
            self.problems.note(|| format!("stage {stage} begins in the middle of a window of {name}"));
        }
        self.enter(*stage);
    }

    /// Makes `stage` the current one, with no sequence delivered.
    fn enter(&mut self, stage: u64) {
        match self.stages.get(stage as usize) {
            Some(_) => self.stage = stage as usize,
            None => self.problems.note(|| format!("a stage is number {stage}, which the config does not have")),
        }
        self.delivered.fill(0);
    }

    /// Advances a component past sequences; false if they do not start where the ones before ended.
    fn advance(
        &mut self,
        range: &SequenceRange,
        what: &str,
        past: impl FnOnce(&mut ComponentAuditor<'a>, &SequenceRange) -> bool,
    ) -> bool {
        let component = self.components.get_mut(range.component as usize);
        if component.is_some_and(|component| past(component, range)) {
            return true;
        }
        let component = self.components.get(range.component as usize);
        let name = component.map_or("an unknown component", |component| &component.audited.name);
        self.problems.note(|| {
            format!(
                "{what} starts at sequence {} of window {} of epoch {} of {name}, not where the previous step ended",
                range.first_sequence,
                range.window,
                range.epoch + 1
            )
        });
        false
    }

    /// Checks the epochs in progress. The data ends where the component that comes next in the schedule has ended.
    fn finish(mut self, is_exhausted: bool) -> Result<Audit, DataError> {
        let last = is_exhausted.then(|| self.stages[self.stage].mixture.schedule().next_component(&self.delivered));
        for (index, component) in self.components.iter_mut().enumerate() {
            component.finish_epoch(last == Some(index), &mut self.problems)?;
        }
        Ok(Audit {
            steps: self.steps,
            targets: self.targets,
            components: self.components.into_iter().map(|component| component.audited).collect(),
            stage_sequences: self.stage_sequences,
            problems: self.problems.0,
        })
    }
}
