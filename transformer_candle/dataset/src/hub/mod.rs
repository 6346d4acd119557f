//! A thin client of the Hugging Face Hub.

/// Where the Hub is and how to talk to it.
#[derive(Clone)]
pub struct HubSettings {
    /// `https://huggingface.co`, or `HF_ENDPOINT`.
    pub endpoint: String,
    /// `HF_TOKEN`; sent to the endpoint's host only.
    pub token: Option<String>,
    /// `HF_HUB_OFFLINE`: refuse to ask.
    pub offline: bool,
}
