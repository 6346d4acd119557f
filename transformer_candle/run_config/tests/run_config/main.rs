//! The crate as its users see it. One program for all tests: each further one would be linked and optimised anew.

#![allow(clippy::unwrap_used)]

mod bad_configs;
mod generated_files;
mod loading;
mod lora;
mod messages;
mod presets;
mod properties;
mod stages;
mod streaming_config;
