import java.util.Map;
import java.util.TreeMap;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;

/**
 * From topic to topic on Flink: SQL, the Kafka connector, exactly once; arguments servers, in, out, folder. It runs until
 * it is ended.
 */
public final class KafkaWindows {
    private KafkaWindows() {}

    private static String connected(Map<String, String> options) {
        StringBuilder made = new StringBuilder("WITH ('connector' = 'kafka', 'format' = 'json'");
        options.forEach((name, value) -> made.append(", '" + name + "' = '" + value + "'"));
        return made.append(")").toString();
    }

    public static void main(String[] arguments) throws Exception {
        String servers = arguments[0];
        String out = arguments[2];
        Configuration settings = new Configuration();
        settings.setString("state.backend.type", "hashmap");
        settings.setString("execution.checkpointing.storage", "filesystem");
        settings.setString("execution.checkpointing.dir", "file://" + arguments[3]);
        settings.setString("execution.checkpointing.interval", "1 s");
        settings.setString("execution.checkpointing.mode", "EXACTLY_ONCE");
        settings.setString("pipeline.object-reuse", "true");
        settings.setString("taskmanager.numberOfTaskSlots", "2");
        settings.setString("restart-strategy.type", "disable");
        settings.setString("rest.bind-port", "0");
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(settings);
        environment.setParallelism(2);
        StreamTableEnvironment tables = StreamTableEnvironment.create(environment);
        tables.getConfig().set("table.local-time-zone", "UTC");
        Map<String, String> from = new TreeMap<>(Map.of(
                "topic", arguments[1],
                "properties.bootstrap.servers", servers,
                "properties.group.id", out,
                "properties.isolation.level", "read_committed",
                "scan.startup.mode", "earliest-offset",
                "json.timestamp-format.standard", "ISO-8601"));
        Map<String, String> to = new TreeMap<>(Map.of(
                "topic", out,
                "properties.bootstrap.servers", servers,
                "properties.transaction.timeout.ms", "600000",
                "sink.delivery-guarantee", "exactly-once",
                "sink.transactional-id-prefix", out,
                "json.timestamp-format.standard", "SQL"));
        tables.executeSql("CREATE TABLE clicks (ts TIMESTAMP(3), `user` BIGINT, page STRING, kind STRING, cents BIGINT, "
                + "WATERMARK FOR ts AS ts - INTERVAL '1' SECOND) " + connected(from));
        tables.executeSql("CREATE TABLE minutes (w TIMESTAMP(0), page STRING, n BIGINT, cents BIGINT) " + connected(to));
        tables.executeSql("INSERT INTO minutes SELECT CAST(window_start AS TIMESTAMP(0)), page, COUNT(*), SUM(cents) "
                + "FROM TABLE(TUMBLE(TABLE clicks, DESCRIPTOR(ts), INTERVAL '1' MINUTE)) "
                + "WHERE kind <> 'view' GROUP BY window_start, window_end, page").await();
    }
}
