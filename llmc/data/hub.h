// Models by their names on the Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION.
#pragma once
#include <string>

bool is_hub_name(const std::string &name);  // true if no file or directory has this name

// Returns the directory of a model: `name` itself, or for a hub name its snapshot in huggingface_hub's shared cache (HF_HUB_CACHE, HF_HOME). An
// incomplete snapshot is downloaded first. Without `weights`, config.json is enough. Dies, with a fix, if the model does not exist, if access is
// denied, or if HF_HUB_OFFLINE forbids the download.
std::string model_directory(const std::string &name, bool weights);

// Returns the directory of a model if it is on this machine, else an empty name. Does not use the network.
std::string fetched_model(const std::string &name);
