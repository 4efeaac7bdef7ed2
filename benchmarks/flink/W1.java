import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.flink.api.common.JobID;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.MapFunction;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.sink2.Sink;
import org.apache.flink.api.connector.sink2.SinkWriter;
import org.apache.flink.api.connector.sink2.WriterInitContext;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource;
import org.apache.flink.api.connector.source.util.ratelimit.RateLimiterStrategy;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.core.execution.CheckpointingMode;
import org.apache.flink.runtime.checkpoint.CheckpointStatsCounts;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.runtime.minicluster.MiniClusterConfiguration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;

/**
 * The reference work W1 on Flink: DataStream API, embedded MiniCluster, heap state, parallelism 2, object reuse.
 *
 * <p>Arguments are name=value: {@code rows}, {@code warm_up} (rows of a job of the same shape that goes first in the same
 * cluster), {@code interval_ms} (0: no checkpoints), {@code folder}, {@code watch_after} (rows a sink subtask only
 * counts; of later ones it keeps the newest count and sum per key), and for latency {@code rate} (rows per second),
 * {@code buffer_timeout_ms} and {@code skip_s} (seconds of warm-up whose latencies do not count).
 *
 * <p>Prints {@code RESULT} and JSON; leaves {@code state-*.bin} and, with a rate, {@code latency-*.bin} in the folder, as
 * the other contenders do.
 */
public final class W1 {
    static final int KEYS = 100_000;
    static final int PARALLELISM = 2;
    static final int BUCKET_NS = 10_000;
    static final int BUCKETS = 500_000;

    /** What the tasks of one job report; they live in this very process. */
    static final AtomicLong FIRST_NS = new AtomicLong();

    static final AtomicLong LAST_NS = new AtomicLong();
    static final AtomicLong SUNK = new AtomicLong();

    private W1() {}

    static long mix(long z) {
        z = (z ^ (z >>> 30)) * 0xbf58476d1ce4e5b9L;
        z = (z ^ (z >>> 27)) * 0x94d049bb133111ebL;
        return z ^ (z >>> 31);
    }

    /** Row number to (key, value, time of emission). The time is read for the first row, or for all if asked. */
    static final class Row implements MapFunction<Long, Tuple3<Long, Long, Long>> {
        private final boolean stamped;
        private boolean noted;

        Row(boolean stamped) {
            this.stamped = stamped;
        }

        @Override
        public Tuple3<Long, Long, Long> map(Long row) {
            long nowNs = 0;
            if (stamped || !noted) {
                nowNs = System.nanoTime();
                if (!noted) {
                    noted = true;
                    FIRST_NS.accumulateAndGet(nowNs, (a, b) -> a == 0 ? b : Math.min(a, b));
                }
            }
            return Tuple3.of(Long.remainderUnsigned(mix(row), KEYS), row, nowNs);
        }
    }

    /** Running count and sum of a key: (key, count, sum, time of emission) for every row. */
    static final class CountAndSum
            extends KeyedProcessFunction<Long, Tuple3<Long, Long, Long>, Tuple4<Long, Long, Long, Long>> {
        private transient ValueState<Tuple2<Long, Long>> state;

        @Override
        public void open(OpenContext context) {
            state = getRuntimeContext().getState(
                    new ValueStateDescriptor<>("totals", Types.TUPLE(Types.LONG, Types.LONG)));
        }

        @Override
        public void processElement(
                Tuple3<Long, Long, Long> row, Context context, Collector<Tuple4<Long, Long, Long, Long>> out)
                throws Exception {
            Tuple2<Long, Long> old = state.value();
            Tuple2<Long, Long> now = old == null ? Tuple2.of(1L, row.f1) : Tuple2.of(old.f0 + 1, old.f1 + row.f1);
            state.update(now);
            out.collect(Tuple4.of(row.f0, now.f0, now.f1, row.f2));
        }
    }

    /** Discards rows and reports what came. */
    static final class Probe implements Sink<Tuple4<Long, Long, Long, Long>> {
        private final String folder;
        private final long watchAfter;
        private final double skipS;
        private final boolean latency;

        Probe(String folder, long watchAfter, boolean latency, double skipS) {
            this.folder = folder;
            this.watchAfter = watchAfter;
            this.latency = latency;
            this.skipS = skipS;
        }

        @Override
        public SinkWriter<Tuple4<Long, Long, Long, Long>> createWriter(WriterInitContext context) {
            return new ProbeWriter(this, context.getTaskInfo().getIndexOfThisSubtask());
        }
    }

    static final class ProbeWriter implements SinkWriter<Tuple4<Long, Long, Long, Long>> {
        private final Probe probe;
        private final int subtask;
        private final long countFromNs;
        private final long[] counts = new long[KEYS];
        private final long[] sums = new long[KEYS];
        private final long[] histogram;
        private long rows;

        ProbeWriter(Probe probe, int subtask) {
            this.probe = probe;
            this.subtask = subtask;
            this.countFromNs = System.nanoTime() + (long) (probe.skipS * 1e9);
            this.histogram = new long[probe.latency ? BUCKETS : 0];
        }

        @Override
        public void write(Tuple4<Long, Long, Long, Long> row, Context context) {
            if (++rows > probe.watchAfter) {
                int key = row.f0.intValue();
                counts[key] = row.f1;
                sums[key] = row.f2;
            }
            if (probe.latency) {
                long nowNs = System.nanoTime();
                if (nowNs >= countFromNs) {
                    histogram[(int) Math.min((nowNs - row.f3) / BUCKET_NS, BUCKETS - 1)]++;
                }
            }
        }

        @Override
        public void flush(boolean endOfInput) {
            if (endOfInput) {
                LAST_NS.accumulateAndGet(System.nanoTime(), Math::max);
            }
        }

        @Override
        public void close() throws IOException {
            SUNK.addAndGet(rows);
            store("state-" + subtask + ".bin", counts, sums);
            if (probe.latency) {
                store("latency-" + subtask + ".bin", histogram);
            }
        }

        private void store(String name, long[]... columns) throws IOException {
            int longs = 0;
            for (long[] column : columns) {
                longs += column.length;
            }
            ByteBuffer bytes = ByteBuffer.allocate(longs * Long.BYTES).order(ByteOrder.LITTLE_ENDIAN);
            for (long[] column : columns) {
                bytes.asLongBuffer().put(column);
                bytes.position(bytes.position() + column.length * Long.BYTES);
            }
            Files.write(Path.of(probe.folder, name), bytes.array());
        }
    }

    static Configuration configuration(Path folder) {
        Configuration settings = new Configuration();
        settings.setString("state.backend.type", "hashmap");
        settings.setString("execution.checkpointing.storage", "filesystem");
        settings.setString("execution.checkpointing.dir", folder.resolve("checkpoints").toUri().toString());
        settings.setString("taskmanager.memory.network.min", "128m");
        settings.setString("taskmanager.memory.network.max", "128m");
        settings.setString("taskmanager.memory.managed.size", "512m");
        settings.setString("rest.bind-port", "0");
        return settings;
    }

    static CheckpointStatsCounts run(MiniCluster cluster, Configuration settings, Map<String, String> options, long rows)
            throws Exception {
        long intervalMs = Long.parseLong(options.get("interval_ms"));
        double rate = Double.parseDouble(options.getOrDefault("rate", "0"));
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(settings);
        environment.setParallelism(PARALLELISM);
        environment.getConfig().enableObjectReuse();
        if (intervalMs > 0) {
            environment.enableCheckpointing(intervalMs, CheckpointingMode.EXACTLY_ONCE);
        }
        if (options.containsKey("buffer_timeout_ms")) {
            environment.setBufferTimeout(Long.parseLong(options.get("buffer_timeout_ms")));
        }
        GeneratorFunction<Long, Long> number = row -> row;
        DataStream<Long> numbers = rate > 0
                ? environment.fromSource(
                        new DataGeneratorSource<>(number, rows, RateLimiterStrategy.perSecond(rate), Types.LONG),
                        WatermarkStrategy.noWatermarks(), "gen")
                : environment.fromSource(
                        new NumberSequenceSource(0, rows - 1), WatermarkStrategy.noWatermarks(), "gen");
        double skipS = Double.parseDouble(options.getOrDefault("skip_s", "0"));
        long watchAfter = Long.parseLong(options.get("watch_after"));
        numbers.map(new Row(rate > 0))
                .returns(Types.TUPLE(Types.LONG, Types.LONG, Types.LONG))
                .keyBy(row -> row.f0, Types.LONG)
                .process(new CountAndSum())
                .returns(Types.TUPLE(Types.LONG, Types.LONG, Types.LONG, Types.LONG))
                .sinkTo(new Probe(options.get("folder"), watchAfter, rate > 0, skipS));
        FIRST_NS.set(0);
        LAST_NS.set(0);
        SUNK.set(0);
        JobID job = cluster.submitJob(environment.getStreamGraph().getJobGraph()).get().getJobID();
        cluster.requestJobResult(job).get().toJobExecutionResult(W1.class.getClassLoader());
        var statistics = cluster.getExecutionGraph(job).get().getCheckpointStatsSnapshot();
        return statistics == null ? null : statistics.getCounts();
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = new HashMap<>();
        for (String argument : arguments) {
            String[] parts = argument.split("=", 2);
            options.put(parts[0], parts[1]);
        }
        Configuration settings = configuration(Path.of(options.get("folder")).toAbsolutePath());
        MiniClusterConfiguration shape = new MiniClusterConfiguration.Builder()
                .setConfiguration(settings)
                .setNumTaskManagers(1)
                .setNumSlotsPerTaskManager(PARALLELISM)
                .build();
        try (MiniCluster cluster = new MiniCluster(shape)) {
            cluster.start();
            long warmUp = Long.parseLong(options.getOrDefault("warm_up", "0"));
            if (warmUp > 0) {
                run(cluster, settings, options, warmUp);
            }
            CheckpointStatsCounts counts = run(cluster, settings, options, Long.parseLong(options.get("rows")));
            System.out.printf(
                    "RESULT {\"rows\": %d, \"seconds\": %.9f, \"checkpoints\": %d, \"checkpoints_failed\": %d}%n",
                    SUNK.get(),
                    (LAST_NS.get() - FIRST_NS.get()) / 1e9,
                    counts == null ? 0 : counts.getNumberOfCompletedCheckpoints(),
                    counts == null ? 0 : counts.getNumberOfFailedCheckpoints());
        }
        System.exit(0);
    }
}
