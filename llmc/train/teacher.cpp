#include "teacher.h"

#include <filesystem>

#include "../core/common.h"
#include "../data/tokenizer.h"
#include "../io/hf.h"
#include "open_config.h"

namespace fs = std::filesystem;

bool teacher_is_base(const Run &run, const std::string &dir) {
    const Options &o = run.options;
    std::error_code error;
    return run.model.config.lora.rank > 0 && o.teacher_load_in == o.load_in && !run.model.grown_from &&
           fs::equivalent(dir, o.model, error);
}

// Dies unless every id means the same to both models. Both may have more rows than tokens.
static void expect_same_tokens(const ModelSpec &student, const ModelSpec &teacher) {
    const char *const dir = teacher.dir.c_str(), *const own = student.dir.c_str();
    if (teacher.tokenizer_hash.empty() || student.tokenizer_hash.empty()) {
        if (teacher.config.V != student.config.V)
            die("--teacher_model %s has a vocabulary of %zu rows, %s of %zu, and one of them has no tokenizer.json that says what they mean\n  fix: use models with their tokenizers",
                dir, teacher.config.V, own, student.config.V);
    } else if (teacher.tokenizer_hash != student.tokenizer_hash) {
        const std::string difference =
            first_difference(teacher.tokenizer_dir + "/tokenizer.json", student.tokenizer_dir + "/tokenizer.json");
        if (!difference.empty())
            die("--teacher_model %s has another tokenizer than %s: %s\n  fix: use a teacher with the student's tokenizer", dir,
                own, difference.c_str());
    }
}

ModelSpec teacher_spec(const Run &run, const std::string &dir) {
    const Options &o = run.options;
    ModelSpec out;
    agree(run.comm, [&] {
        if (fs::exists(dir + "/adapter_config.json") && !HfWeights::present(dir))
            die("--teacher_model %s is an adapter\n  fix: add it to its model's weights with the task merge, and give the merged model",
                dir.c_str());
        out = open_config(run, dir);
        out.config.weight_bits = weight_bits(o.teacher_load_in);
        if (out.config.reward)
            die("--teacher_model %s is a reward model, which has no distributions of tokens\n  fix: use a language model",
                dir.c_str());
        if (!o.plan && !HfWeights::present(dir))
            die("--teacher_model %s has no weights (model.safetensors, or shards with an index)\n  fix: give the directory of a trained model",
                dir.c_str());
        expect_same_tokens(run.model, out);
        if (o.tensor_parallel > 1 && run.task == DISTILL && out.config.V != run.model.config.V)
            die("--tensor_parallel %zu divides the %zu rows of the student's vocabulary and the %zu rows of the teacher's in different places\n  fix: a teacher with as many rows, or leave --tensor_parallel out",
                o.tensor_parallel, run.model.config.V, out.config.V);
        out.ranks = ranks_of(run, out.config, run.model.ranks.world, run.model.ranks.sp);
    });
    return out;
}
