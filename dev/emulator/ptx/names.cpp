#include "names.h"

#include <set>

#include "decoder.h"

namespace ptx {

const Forms &all_forms() {
    static const Forms forms = [] {
        Forms f;
        add_arithmetic(f);
        add_warp_operations(f);
        add_memory_operations(f);
        add_system_calls(f);
        add_mbarriers(f);
        add_bulk_copies(f);
        add_wgmma(f);
        add_clusters(f);
        return f;
    }();
    return forms;
}

bool is_special(const std::string &name) {
    static const std::set<std::string>
        single = {"%laneid",          "%warpid",           "%nwarpid",     "WARP_SZ",      "%lanemask_eq",
                  "%lanemask_lt",     "%lanemask_le",      "%lanemask_gt", "%lanemask_ge", "%dynamic_smem_size",
                  "%cluster_ctarank", "%cluster_nctarank", "%smid",        "%nsmid"},
        of_axes = {"%tid", "%ntid", "%ctaid", "%nctaid", "%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid"};
    const size_t dot = name.rfind('.');
    return single.count(name) ||
           (dot + 2 == name.size() && name.back() >= 'x' && name.back() <= 'z' && of_axes.count(name.substr(0, dot)));
}

uint8_t machine_instructions(const std::string &name) {
    static const std::pair<const char *, uint8_t> several[] = {
        {"div.u64", 70},
        {"rem.u64", 70},
        {"div.s64", 80},
        {"rem.s64", 80},
        {"div.u32", 18},
        {"rem.u32", 18},
        {"div.s32", 24},
        {"rem.s32", 24},
        {"mul.lo.s64", 4},
        {"mul.lo.u64", 4},
        {"mad.lo.s64", 4},
        {"mad.lo.u64", 4},
        {"mul.hi.u64", 7},
        {"div.rn.f32", 9},
        {"div.approx.f32", 5},
        {"rcp.rn.f32", 6},
        {"sqrt.rn.f32", 8},
        {"div.rn.f64", 12},
        {"rcp.rn.f64", 9},
        {"sqrt.rn.f64", 14},
        {"ex2.approx.f32", 4},
        {"lg2.approx.f32", 4},
        {"sqrt.approx.f32", 4},
        {"rcp.approx.f32", 4},
        {"sin.approx.f32", 2},
        {"cos.approx.f32", 2},
        {"sin.approx.ftz.f32", 2},
        {"cos.approx.ftz.f32", 2},
        {"div.approx.ftz.f32", 2},
        {"div.full.f32", 5},
        {"ex2.approx.ftz.bf16x2", 2},
    };
    for (const auto &[known, n] : several)
        if (name == known) return n;
    const std::string type = name.substr(name.rfind('.') + 1), operation = name.substr(0, name.find('.'));
    const bool of_halves = type == "s64" || type == "u64" || type == "b64";
    for (const char *known : {"add", "sub", "neg", "shl", "shr", "and", "or", "xor", "not", "min", "max", "setp", "selp"})
        if (of_halves && operation == known) return 2;
    return 1;
}

std::string plain(const std::string &name) {
    static const std::set<std::string> hints = {"ca",      "cg",   "cs",       "lu",      "cv",      "wb",
                                                "wt",      "weak", "volatile", "relaxed", "acquire", "release",
                                                "acq_rel", "cta",  "cluster",  "gpu",     "sys"},
                                       memory = {"ld", "st", "atom", "red", "createpolicy", "cp"}, barriers = {"bar", "barrier"},
                                       of_mbarriers = {"acquire", "release",         "cta", "cluster",
                                                       "shared",  "shared::cluster", "b64"};
    const std::vector<std::string> parts = split(name, '.');
    std::string out = parts[0] == "barrier" ? "bar" : parts[0];
    for (size_t n = 1; n < parts.size(); n++) {
        const std::string part = parts[n].substr(0, parts[n].find("::cta"));
        const bool cache = part.rfind("L1::", 0) == 0 || part.rfind("L2::", 0) == 0;
        const bool orders = (parts[0] == "ld" && part == "acquire") || (parts[0] == "st" && part == "release"),
                   own_form = orders && name.find(".global") != name.npos;
        if (memory.count(parts[0]) && !own_form && (cache || (parts[0] != "cp" && hints.count(part)))) continue;
        if (barriers.count(parts[0]) && (part == "cta" || part == "aligned")) continue;
        if (parts[0] == "mbarrier" && of_mbarriers.count(part)) continue;
        if (part == "tile") continue;                               // the usual way of a tensor map
        if (part == "m8n8" && parts[n - 1] != "aligned") continue;  // "aligned.x4.m8n8" is an older order
        out += "." + part;
        if (part == "aligned" && parts[0].find("matrix") != std::string::npos && parts[n + 1] != "m8n8") out += ".m8n8";
    }
    return out;
}
}  // namespace ptx
