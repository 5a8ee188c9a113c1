// What ranks say to each other. Every task is written against this struct, so that one rank and many are one program.
#pragma once

struct Comm {
    const int rank, size;

    Comm(int rank, int size) : rank(rank), size(size) {}
    virtual ~Comm() = default;

    // Agreement, on the host: every rank calls with its own value and gets the same answer, summed in a fixed order.
    virtual double sum(double) = 0;
    virtual double max(double) = 0;
    virtual bool all(bool) = 0;
};

struct SelfComm final : Comm {  // a world of one
    SelfComm() : Comm(0, 1) {}
    double sum(double value) override { return value; }
    double max(double value) override { return value; }
    bool all(bool value) override { return value; }
};
