;;;; Files.

(in-package #:pelton-tests)

(deftest a-written-file-is-read-back
  (pelton:with-engine (engine)
    (let ((path (in-directory "a [file]*")) (octets (make-octets 3000000)))
      (dotimes (i (length octets)) (setf (aref octets i) (mod (* i 7) 251)))
      (pelton:write-file-octets engine path octets :mode #o600 :sync t :timeout *limit*)
      (is (equalp (pelton:read-file-octets engine path :timeout *limit*) octets))
      (let ((status (pelton:file-status engine path)))
        (is (eq (getf status :kind) :regular))
        (is (eql (getf status :bytes) 3000000))
        (is (eql (getf status :mode) #o600)))
      (pelton:with-file (file engine path :direction :io)
        (is (eql 5 (pelton:write-file engine file (bytes "--hello--") :start 2 :end 7 :offset 10)))
        (let ((read (make-octets 7)))
          (is (eql 5 (pelton:read-file engine file read :start 1 :end 6 :offset 10)))
          (is (equal (text (subseq read 1 6)) "hello"))
          ;; Its own position.
          (is (eql 7 (pelton:read-file engine file read)))
          (is (equalp read (subseq octets 0 7)))
          (is (eql 7 (pelton:read-file engine file read)))
          (is (equalp (subseq read 0 3) (subseq octets 7 10)))
          (pelton:truncate-file engine file 12)
          (pelton:write-file engine file (bytes "end") :offset :end)
          (is (eql 5 (pelton:read-file engine file read :offset 10)))
          (is (equal (text (subseq read 0 5)) "heend"))
          (pelton:allocate-file engine file 0 8192)
          (pelton:sync-file engine file :data t)
          (is (eql 8192 (getf (pelton:file-status engine file) :bytes))))))))

(deftest directory-entries-are-created-listed-and-removed
  (pelton:with-engine (engine :root *directory*)
    (pelton:make-directory engine "d" #o755)
    (dotimes (i 600) (pelton:write-file-octets engine (format nil "d/~d" i) (bytes "x")))
    (is (equal (sort (mapcar #'parse-integer (mapcar #'car (pelton:list-directory engine "d" :timeout *limit*))) #'<)
               (loop for i below 600 collect i)))
    (is (equal (pelton:list-directory engine ".") '(("d" . :directory))))
    (pelton:rename-path engine "d/1" "two")
    (pelton:link-file engine "two" "three")
    (is (eql 2 (getf (pelton:file-status engine "two") :links)))
    (is (eql 39 (pelton:system-error-errno (signals pelton:system-error
                                                    (pelton:remove-directory engine "d"))))) ; ENOTEMPTY
    (dotimes (i 600) (unless (eql i 1) (pelton:unlink-file engine (format nil "d/~d" i))))
    (pelton:remove-directory engine "d")
    (let ((condition (signals pelton:system-error (pelton:read-file-octets engine "d/5"))))
      (is (eql 2 (pelton:system-error-errno condition))) ; ENOENT
      (is (search "d/5" (princ-to-string condition))))
    ;; Nothing leads out of the root.
    (is (eql 18 (pelton:system-error-errno (signals pelton:system-error (pelton:file-status engine "../.."))))) ; EXDEV
    (signals pelton:usage-error (let ((file (pelton:open-file engine "two")))
                              (pelton:close-handle file)
                              (pelton:read-file engine file (make-octets 1))))))

(deftest a-file-operation-can-be-interrupted-and-releases-its-memory
  (sb-posix:mkfifo (in-directory "fifo") #o600)
  (pelton:with-engine (engine)
    ;; Both ends, so that opening does not wait. The FIFO is empty.
    (pelton:with-file (file engine (in-directory "fifo") :direction :io :timeout *limit*)
      (let ((octets (make-octets 4)))
        (signals pelton:timed-out (pelton:read-file engine file octets :timeout 0.02))
        (signals sb-ext:timeout (sb-ext:with-timeout 0.02 (pelton:read-file engine file octets)))
        (with-an-interrupt-pending (pelton:read-file engine file octets))
        (fill octets 0)
        (pelton:write-file engine file (bytes "late") :timeout *limit*)
        ;; The cancelled reads do not write to it.
        (sb-ext:gc :full t)
        (is (equalp octets #(0 0 0 0)))
        (is (eql 4 (pelton:read-file engine file octets :timeout *limit*)))
        (is (equal (text octets) "late"))
        ;; WAIT-LONGER gets it.
        (is (eql 4 (handler-bind ((pelton:timed-out (lambda (condition)
                                                      (joined (in-thread (pelton:with-engine (other)
                                                                           (pelton:write-file other file
                                                                                              (bytes "more")))))
                                                      (pelton:wait-longer condition))))
                     (pelton:read-file engine file octets :timeout 0.02))))
        (is (equal (text octets) "more"))))))
