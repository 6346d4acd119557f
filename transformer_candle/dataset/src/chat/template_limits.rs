//! Limits of a chat template, so that none can exhaust the stack, the memory or the time of the program.
//!
//! Before a template is parsed, its size and the depth of its expressions are bounded ([`check_source`]): minijinja
//! parses, compiles and drops an expression recursively. What a rendering computes and writes is bounded by [`fuel`].
//! `bounded_values` bounds the values that it makes.

use std::ops::Range;

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use serde_json::Value as Json;

/// Bytes of a template. The longest of well-known models have 20 kB.
const MAX_SOURCE: usize = 1 << 20;
/// Brackets in brackets.
const MAX_BRACKETS: usize = 24;
/// Tokens of an expression that stand between the innermost bracket, and of those around it, and the last comma: an
/// upper bound of the depth of its syntax tree.
const MAX_CHAIN: usize = 400;
/// `elif`s of a template: each is parsed inside of the one before it.
const MAX_ELIFS: usize = 200;
/// Nested statements, calls of macros and recursive loops while a template is rendered; a call of a macro counts four.
pub(super) const MAX_RECURSION: usize = 200;

/// What a rendering may use for a conversation, in minijinja's unit: an instruction, or 64 bytes that are written. A
/// template uses some hundred per message; those that look for each message at all that follow use ten per pair.
const FUEL: u64 = 1_000_000;
const FUEL_PER_MESSAGE: u64 = 20_000;
const FUEL_PER_BYTE: u64 = 1;

/// Bytes of an error's text that are shown: a template may write its own.
const MAX_MESSAGE: usize = 1000;

/// A token of a tag, and its place in the source.
type PlacedToken<'a> = (Token<'a>, Range<usize>);

/// A tag `{% ... %}` or an expression `{{ ... }}`.
pub(super) struct Tag<'a> {
    /// The tokens between the delimiters.
    pub tokens: Vec<PlacedToken<'a>>,
    /// The place of the closing delimiter.
    pub end: Range<usize>,
    pub is_statement: bool,
    line: u16,
}

/// Calls `visit` with each tag of a template, up to the first that cannot be read, which the parser will name.
pub(super) fn visit_tags<'a>(
    source: &'a str,
    syntax: &SyntaxConfig,
    mut visit: impl FnMut(&Tag<'a>) -> Result<(), String>,
) -> Result<(), String> {
    let mut tag = Tag { tokens: Vec::new(), end: 0..0, is_statement: false, line: 0 };
    for token in tokenize(source, false, syntax.clone()) {
        let Ok((token, span)) = token else { break };
        let place = span.start_offset as usize..span.end_offset as usize;
        match token {
            Token::TemplateData(_) => {}
            Token::VariableStart | Token::BlockStart => {
                tag.is_statement = matches!(token, Token::BlockStart);
                tag.line = span.start_line;
                tag.tokens.clear();
            }
            Token::VariableEnd | Token::BlockEnd => {
                tag.end = place;
                visit(&tag)?;
                tag.tokens.clear();
            }
            token => tag.tokens.push((token, place)),
        }
    }
    // A tag without an end is parsed too, up to the end of the source.
    visit(&tag)
}

/// Checks the size of a template before anything reads it.
pub(super) fn check_size(source: &str) -> Result<(), String> {
    if source.len() > MAX_SOURCE {
        return Err(format!("it has {} bytes, and a chat template at most {MAX_SOURCE}", source.len()));
    }
    Ok(())
}

/// Checks that a template's expressions are not nested so deeply that parsing them would exhaust the stack.
pub(super) fn check_source(source: &str, syntax: &SyntaxConfig) -> Result<(), String> {
    let mut elifs = 0;
    visit_tags(source, syntax, |tag| {
        let at = format!("(line {})", tag.line);
        let (mut enclosing, mut segment, mut chain) = (Vec::new(), 0, 0);
        for (token, _) in &tag.tokens {
            match token {
                Token::Comma => {
                    chain -= segment;
                    segment = 0;
                    continue;
                }
                Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => {
                    enclosing.push(std::mem::take(&mut segment));
                }
                Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                    chain -= segment;
                    segment = enclosing.pop().unwrap_or_default();
                }
                _ => {}
            }
            (segment, chain) = (segment + 1, chain + 1);
            if enclosing.len() > MAX_BRACKETS {
                return Err(format!("it nests more than {MAX_BRACKETS} brackets {at}: use `set` for the inner ones"));
            }
            if chain > MAX_CHAIN {
                return Err(format!(
                    "it has an expression of more than {MAX_CHAIN} operators and operands {at}: use `set` for its parts"
                ));
            }
        }
        elifs += usize::from(tag.is_statement && matches!(tag.tokens.first(), Some((Token::Ident("elif"), _))));
        if elifs > MAX_ELIFS {
            return Err(format!("it has more than {MAX_ELIFS} `elif`s {at}: look the value up in a dictionary"));
        }
        Ok(())
    })
}

/// Returns the fuel for rendering messages with other variables, such as tools.
pub(super) fn fuel<'a>(messages: &'a [Json], variables: impl Iterator<Item = &'a Json>) -> u64 {
    let bytes: u64 = messages.iter().chain(variables).map(size).sum();
    FUEL + FUEL_PER_MESSAGE * messages.len() as u64 + FUEL_PER_BYTE * bytes
}

/// Returns about the bytes that a value has as JSON.
fn size(value: &Json) -> u64 {
    match value {
        Json::String(text) => text.len() as u64,
        Json::Array(items) => items.iter().map(|item| 2 + size(item)).sum(),
        Json::Object(fields) => fields.iter().map(|(name, field)| 6 + name.len() as u64 + size(field)).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 4,
    }
}

/// Cuts the text of an error.
pub(super) fn shortened(message: &str) -> String {
    if message.len() <= MAX_MESSAGE {
        return message.to_owned();
    }
    format!("{}...", &message[..message.floor_char_boundary(MAX_MESSAGE)])
}
