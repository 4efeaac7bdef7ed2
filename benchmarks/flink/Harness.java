import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.flink.api.common.JobID;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.core.execution.CheckpointingMode;
import org.apache.flink.runtime.checkpoint.CheckpointStatsCounts;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.runtime.minicluster.MiniClusterConfiguration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * What all jobs share: an embedded MiniCluster with one task manager and two slots, heap state, object reuse, a warm-up
 * job of the same shape in the same cluster, and the line of result.
 *
 * <p>Arguments are name=value: {@code rows}, {@code warm_up} (rows of the job that goes first), {@code interval_ms} (0: no
 * checkpoints), {@code folder}, optionally {@code buffer_timeout_ms}, and whatever else the job wants.
 */
final class Harness {
    static final int PARALLELISM = 2;

    /** What the tasks of one job report; they live in this very process. */
    private static final AtomicLong FIRST_NS = new AtomicLong();

    private static final AtomicLong LAST_NS = new AtomicLong();
    private static final AtomicLong SUNK = new AtomicLong();

    /** Puts a job's steps into the environment. */
    interface Job {
        void build(StreamExecutionEnvironment environment, long rows) throws Exception;
    }

    /** What a job tells beside the ordinary, asked after its end: JSON fields, each with a comma before it. */
    interface Findings {
        String json();
    }

    private Harness() {}

    static void emitted(long nowNs) {
        FIRST_NS.accumulateAndGet(nowNs, (a, b) -> a == 0 ? b : Math.min(a, b));
    }

    static void inputEnded() {
        LAST_NS.accumulateAndGet(System.nanoTime(), Math::max);
    }

    static void sunk(long rows) {
        SUNK.addAndGet(rows);
    }

    /** The finisher of splitmix64. */
    static long mix(long z) {
        z = (z ^ (z >>> 30)) * 0xbf58476d1ce4e5b9L;
        z = (z ^ (z >>> 27)) * 0x94d049bb133111ebL;
        return z ^ (z >>> 31);
    }

    static Map<String, String> options(String[] arguments) {
        Map<String, String> options = new HashMap<>();
        for (String argument : arguments) {
            String[] parts = argument.split("=", 2);
            options.put(parts[0], parts[1]);
        }
        return options;
    }

    /** Writes columns of little-endian 64-bit numbers, one after the other. */
    static void store(String folder, String name, long[]... columns) throws IOException {
        int longs = 0;
        for (long[] column : columns) {
            longs += column.length;
        }
        ByteBuffer bytes = ByteBuffer.allocate(longs * Long.BYTES).order(ByteOrder.LITTLE_ENDIAN);
        for (long[] column : columns) {
            bytes.asLongBuffer().put(column);
            bytes.position(bytes.position() + column.length * Long.BYTES);
        }
        Files.write(Path.of(folder, name), bytes.array());
    }

    private static Configuration configuration(Path folder) {
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

    private static CheckpointStatsCounts run(
            MiniCluster cluster, Configuration settings, Map<String, String> options, Job job, long rows)
            throws Exception {
        long intervalMs = Long.parseLong(options.get("interval_ms"));
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(settings);
        environment.setParallelism(PARALLELISM);
        environment.getConfig().enableObjectReuse();
        if (intervalMs > 0) {
            environment.enableCheckpointing(intervalMs, CheckpointingMode.EXACTLY_ONCE);
        }
        if (options.containsKey("buffer_timeout_ms")) {
            environment.setBufferTimeout(Long.parseLong(options.get("buffer_timeout_ms")));
        }
        job.build(environment, rows);
        FIRST_NS.set(0);
        LAST_NS.set(0);
        SUNK.set(0);
        JobID id = cluster.submitJob(environment.getStreamGraph().getJobGraph()).get().getJobID();
        cluster.requestJobResult(id).get().toJobExecutionResult(Harness.class.getClassLoader());
        var statistics = cluster.getExecutionGraph(id).get().getCheckpointStatsSnapshot();
        return statistics == null ? null : statistics.getCounts();
    }

    /** Runs the job, prints {@code RESULT} and JSON, and ends the process. */
    static void main(Map<String, String> options, Job job, Findings findings) throws Exception {
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
                run(cluster, settings, options, job, warmUp);
                findings.json();
            }
            CheckpointStatsCounts counts = run(cluster, settings, options, job, Long.parseLong(options.get("rows")));
            System.out.printf(
                    "RESULT {\"rows\": %d, \"seconds\": %s, \"checkpoints\": %d, \"checkpoints_failed\": %d%s}%n",
                    SUNK.get(),
                    (LAST_NS.get() - FIRST_NS.get()) / 1e9,
                    counts == null ? 0 : counts.getNumberOfCompletedCheckpoints(),
                    counts == null ? 0 : counts.getNumberOfFailedCheckpoints(),
                    findings.json());
        }
        System.exit(0);
    }
}
