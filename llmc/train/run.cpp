#include "run.h"

#include "../core/common.h"
#include "../io/hf.h"
#include "../model/lora.h"

void Run::say(const char *text, ...) const {
    if (!is_main_rank()) return;
    va_list args;
    va_start(args, text);
    FILE *const out = notes_stream(task);
    fprintf(out, "%s\n", vformat(text, args).c_str());
    va_end(args);
    fflush(out);
}

void write_companions(const ModelSpec &model, const ChatFormat &chat, const std::string &dir, const std::string &dtype) {
    const ModelConfig &config = model.config;
    if (!model.tokenizer_dir.empty()) {
        copy_tokenizer(model.tokenizer_dir, dir, chat.chat_template);
        copy_vocabulary(model.dir, dir);
    }
    if (!config.reward) write_generation_config(dir, config);
    if (config.lora.rank) write_lora(dir, config, model.dir);  // last: without it a directory is no model
    else write_config(dir, config, dtype);
}
