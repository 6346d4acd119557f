//! Advice that a new run gives on its settings.

#![allow(clippy::unwrap_used)]

mod support;

use support::Workshop;
use training::{memory_plan::MemoryPlan, run_options::ResumeFrom, trainer::Trainer};

#[test]
fn settings_that_leave_speed_on_the_table_are_named_once() {
    let workshop = Workshop::new();
    let advice = |trainer: &mut Trainer| trainer.take_advice();
    assert!(advice(&mut Trainer::new(workshop.run("fine", &[])).unwrap()).is_empty());
    let slow = ["data.batch_size=1", "runtime.activation_recompute=block"];
    let mut trainer = Trainer::new(workshop.run("slow", &slow)).unwrap();
    let first_advice = advice(&mut trainer);
    assert_eq!(first_advice.len(), 2, "{first_advice:?}");
    assert!(
        first_advice[0].starts_with("runtime.activation_recompute is block")
            && first_advice[0].contains("selective fits")
    );
    assert!(
        first_advice[1].starts_with("data.batch_size is 1, and 8 sequences at a time would fit"),
        "{}",
        first_advice[1]
    );
    let records = workshop.metrics("slow", "advice");
    assert_eq!(records.iter().map(|line| line["text"].as_str().unwrap()).collect::<Vec<_>>(), first_advice);
    assert!(records.iter().all(|line| line["step"] == 0));
    trainer.step().unwrap();
    trainer.save().unwrap();
    drop(trainer);
    let mut resumed = Trainer::resume(workshop.run("slow", &slow), &ResumeFrom::Latest, false).unwrap();
    assert!(advice(&mut resumed).is_empty(), "a checkpoint keeps its micro-batch");
    assert_eq!(workshop.metrics("slow", "advice").len(), 2);
    drop(resumed);
    let tight = MemoryPlan::new(&workshop.run("tight", &slow)).unwrap().bytes;
    let limit = format!("runtime.memory_limit={tight}B");
    let mut tight = Trainer::new(workshop.run("tight", &[&slow[..], &[&limit]].concat())).unwrap();
    assert!(advice(&mut tight).is_empty(), "nothing else fits");
}
