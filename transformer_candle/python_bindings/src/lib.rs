//! The trainer as the Python extension `orchestrator._native`: arguments in, values and exceptions out, no logic of its
//! own.
//!
//! Long work runs without the GIL and ends when a signal handler raises something.

// PyO3 passes arguments by value.
#![allow(clippy::needless_pass_by_value)]

mod arguments;
mod chat;
mod commands;
mod config;
mod data;
mod errors;
mod evaluation;
mod generation;
mod gpu_state;
mod json;
mod lock;
mod machine;
mod model_directory;
mod named_run;
mod plan;
mod process_owned;
mod ranks;
mod signals;
mod stream;
mod trainer;
mod validate_data;
mod values;

#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;
    use run_config::BUILT_IN_TEMPLATES;
    use training::launcher::LAUNCHER;

    #[pymodule_export]
    use super::{
        chat::{ChatModel, Reply},
        commands::{declared_commands, run_command, stop_with_launcher},
        config::{
            RunConfig, changes_on_resume, check_adapter_config, check_tokenizer_json, config_to_yaml, json_schema,
            parse_config, presets, vocab_size,
        },
        data::{DataSource, Documents, cache_root, duration, hub_proxy, hub_token, redacted_url},
        evaluation::{EvaluationReport, evaluate_model},
        generation::{Completion, generate, logits},
        gpu_state::gpu_state,
        lock::RunLock,
        machine::{
            Gpu, check_profile, check_sequences, check_threads, check_time_limit, environment, gpus, open_device,
        },
        model_directory::{
            check_start_adapters, checked_adapters, checked_model_config, model_directory, model_file_problem,
            model_tokens,
        },
        named_run::{config_of_run, model_of_run, parse_count, run_directory, runs},
        plan::{MemoryPlan, gpu_table, memory_plan},
        ranks::{Memory, train_rank},
        stream::TokenStream,
        trainer::{StepReport, Trainer},
        validate_data::{DataReport, validate_data},
    };

    #[pymodule_init]
    fn add_constants_and_errors(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("LAUNCHER", LAUNCHER)?;
        module.add("BUILT_IN_CHAT_TEMPLATES", BUILT_IN_TEMPLATES)?;
        super::errors::register(module)
    }
}
