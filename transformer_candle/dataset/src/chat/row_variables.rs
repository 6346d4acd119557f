//! The variables of a template that come from a row, which keep in mind whether the template reads them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use minijinja::Value;
use minijinja::value::Object;

/// The name of the variable for the row's tools.
pub(super) const TOOLS: &str = "tools";

/// A variable that a row names.
#[derive(Debug)]
struct RowVariable {
    name: String,
    /// `None` for a field beside the messages that transformers does not pass to the template.
    value: Option<Value>,
    is_read: AtomicBool,
}

/// The variables that a row names.
#[derive(Debug)]
pub(super) struct RowVariables(Vec<RowVariable>);

impl RowVariables {
    /// Makes variables of the values that the template is given, and of the names of fields that it is not given.
    pub(super) fn new(
        given_values: impl Iterator<Item = (String, Value)>,
        absent_names: impl Iterator<Item = String>,
    ) -> Self {
        let given_values = given_values.map(|(name, value)| (name, Some(value)));
        let absent_names = absent_names.map(|name| (name, None));
        let variable = |(name, value)| RowVariable { name, value, is_read: AtomicBool::new(false) };
        Self(given_values.chain(absent_names).map(variable).collect())
    }

    /// The names of the variables that the template was given and has not read.
    pub(super) fn unread(&self) -> impl Iterator<Item = &str> {
        self.names(true, false)
    }

    /// The names of the fields that the template has read and was not given.
    pub(super) fn missed(&self) -> impl Iterator<Item = &str> {
        self.names(false, true)
    }

    fn names(&self, is_given: bool, is_read: bool) -> impl Iterator<Item = &str> {
        let is_match = move |variable: &&RowVariable| {
            variable.value.is_some() == is_given && variable.is_read.load(Ordering::Relaxed) == is_read
        };
        self.0.iter().filter(is_match).map(|variable| variable.name.as_str())
    }
}

/// All variables that a template is rendered with: first those of the row.
#[derive(Debug)]
pub(super) struct TemplateVariables {
    pub of_row: Arc<RowVariables>,
    pub others: Vec<(String, Value)>,
}

impl Object for TemplateVariables {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        let of_row = self.of_row.0.iter().find(|variable| variable.name == key);
        let row_value = of_row.and_then(|variable| variable.value.clone());
        let is_given = row_value.is_some();
        let value = row_value
            .or_else(|| self.others.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.clone()));
        // A field that is not given is missed only where nothing else has its name.
        if let Some(variable) = of_row.filter(|_| is_given || value.is_none()) {
            variable.is_read.store(true, Ordering::Relaxed);
        }
        value
    }
}
