// Models by their names on the Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION.
#pragma once
#include <string>

bool is_hub_name(const std::string &name);  // and there is no such file or directory

// Returns the directory of a model: `name` itself, or for a name of the hub its snapshot in the cache that huggingface_hub shares with all programs
// (HF_HUB_CACHE, HF_HOME), which it downloads first if it is not there whole. Without `weights`, config.json is enough. Dies, with what to do,
// if the model is nowhere, may not be read, or if HF_HUB_OFFLINE forbids to ask.
std::string model_directory(const std::string &name, bool weights);

// Returns the directory of a model if it is on this machine, else an empty name. Asks nobody.
std::string fetched_model(const std::string &name);
